"""The endurance of a memory on a short stream: it is sound, and what is not sound is said."""

import json

import pytest
import torch

from kvalign.memory.memory import Memory
from scripts import memory_endurance
from scripts.memory_endurance import MemoryEnduranceSettings

pytestmark = pytest.mark.slow

SHORT = MemoryEnduranceSettings(num_tokens=12_000, memory=2000, max_slope=1e7)


def test_a_short_stream_is_sound(capsys):
    assert memory_endurance.run(SHORT) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["oldest"] == found["oldest_held"] == 2044
    assert found["num_taken"] > 90_000 and not found["faults"]


def test_what_is_off_is_said(capsys, monkeypatch):
    find = Memory.find

    def older(self, queries, asking):
        """Ages that are one too high, and no number now and then."""
        found = find(self, queries, asking)
        self.entries.keys[..., :1, :1] = torch.nan
        return found._replace(ages=found.ages + 1)

    monkeypatch.setattr(Memory, "find", older)
    assert memory_endurance.run(SHORT) == 1
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert any("num_nan above 0" in x for x in faults)
    assert any("num_other above 0" in x for x in faults)
