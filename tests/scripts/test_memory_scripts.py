"""The scripts of the memory: which layers need one; a short stream is sound."""

import json

import pytest

from scripts import memory_endurance
from scripts.memory_endurance import MemoryEnduranceSettings
from scripts.memory_layers import MemoryLayersSettings, run


@pytest.mark.slow
def test_a_short_stream_is_sound(capsys):
    short = MemoryEnduranceSettings(num_tokens=12_000, memory=2000, max_slope=1e7)
    assert memory_endurance.run(short) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["oldest"] == found["oldest_held"] == 2044
    assert found["num_taken"] > 90_000 and not found["faults"]


@pytest.mark.parametrize(("sets", "asked"), [(None, 6), ("0-5 0,4-5 3", 3)])
def test_a_line_for_each_set(sets, asked, tmp_path, capsys):
    (tmp_path / "t.txt").write_text("The island was first settled by people of the island. " * 20)
    corpus = f"text:{tmp_path / 't.txt'}"
    run(MemoryLayersSettings(corpus=corpus, cache_size=16, num_tokens=96, sets=sets))
    first, *lines = map(json.loads, capsys.readouterr().out.splitlines())
    assert len(lines) == asked
    gained = first["no memory"] - first["all layers"]
    for line in lines:
        assert line["share"] * gained == pytest.approx(first["no memory"] - line["loss"], abs=1e-5)
    if sets:
        assert [line["layers"] for line in lines] == sets.split()
        assert lines[0]["share"] == pytest.approx(1)
    else:
        assert [line["without"] for line in lines] == [*range(6)]
