"""The endurance of a memory on a short stream: it is sound, and what is not sound is said."""

import json

import pytest

from scripts import memory_endurance
from scripts.memory_endurance import MemoryEnduranceSettings

pytestmark = pytest.mark.slow

SHORT = MemoryEnduranceSettings(num_tokens=12_000, memory=2000, max_slope=1e7)


def test_a_short_stream_is_sound(capsys):
    assert memory_endurance.run(SHORT) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["oldest"] == found["oldest_held"] == 2044
    assert found["num_taken"] > 90_000 and not found["faults"]
