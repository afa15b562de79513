"""The script that measures which layers need a memory."""

import json

import pytest

from scripts.memory_layers import MemoryLayersSettings, run


@pytest.mark.parametrize(("sets", "asked"), [(None, 6), ("0-5 0,4-5 3", 3)])
def test_a_line_for_each_set(sets, asked, tmp_path, capsys):
    (tmp_path / "t.txt").write_text("The island was first settled by people of the island. " * 20)
    run(
        MemoryLayersSettings(
            corpus=f"text:{tmp_path / 't.txt'}", cache_size=16, num_tokens=96, sets=sets
        )
    )
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
