"""The script of the suite `learned-positions`: its form for a CPU, made smaller still."""

import shlex

import pytest
from helpers.smaller import INSIDE, TEXT, output_of

from kvalign.app.cli.catalogue import Command
from kvalign.app.suites.suite import Cell, parse_suite, read_suite
from kvalign.foundation.files import read_json
from scripts import learned_positions as script


@pytest.mark.slow
def test_every_row_of_the_small_form_is_there(tmp_path, monkeypatch, capfd):
    """Each step in this process: one of its own takes seconds to begin."""

    def measured(cell, out, seconds):
        words = shlex.split(cell.at(out).command)[1:]
        script.keep(cell, out, output_of([*words, "--json"]))
        return ""

    monkeypatch.setattr(script, "measured", measured)
    peak = "kvalign.eval.evaluations.latency.timing._peak_mb"
    monkeypatch.setattr(peak, INSIDE[peak])
    (tmp_path / "words.txt").write_text(TEXT)
    less = f"text=text:{tmp_path / 'words.txt'} layers=2 hidden=64 context=64 vocabulary=300 "
    less += "minutes=0.01 length=59 sizes=8,58 table_tokens=3000 recorded=600 shifts=1,8 steps=5 "
    less += "residual_steps=1 labels=60 labels_of_networks=12"
    missed = script.run_suite(tmp_path, 40, "--trial-len 5", f"{script.SMALL} {less}")
    printed = capfd.readouterr().out
    assert missed == []
    cells = parse_suite(read_suite(script.SUITE), script.SUITE, "", script.SMALL)
    for cell in cells:
        assert f"{cell.name}: done (" in printed
    for aligner in ("table", "keys", "both", "rollout", "residual"):
        for size in (8, 58):
            assert f"C = {size}, {aligner}: " in printed
            for what in ("perplexity", " ms a step"):
                rows = [x for x in printed.splitlines() if f"C = {size}, kvalign ({aligner}" in x]
                assert any(what in row for row in rows)
    for method in ("recompute", "window", "streaming-llm", "discard-half"):
        assert f"C = 58, {method}: perplexity " in printed


@pytest.mark.slow
def test_a_step_has_a_process_of_its_own_and_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "_PRELOADED", [])
    methods = Command("methods")
    cell = Cell("methods", methods, methods.settings(), is_preparation=True)
    assert script.measured(cell, tmp_path, 0) == "stopped after 0 s"
    assert script.measured(cell, tmp_path, 300) == ""
    (path,) = tmp_path.rglob("*.json")
    assert read_json(path)["command"] == "kvalign methods"


def test_what_fails_or_comes_too_late_is_told_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    def measured(cell, out, seconds):
        return "exit code 1" if cell.name == "record" else ""

    monkeypatch.setattr(script, "measured", measured)
    monkeypatch.setattr(script, "findings", lambda name, out: [f"found: {name}"])
    missed = script.run_suite(tmp_path, 1, "", "")
    printed = capsys.readouterr().out
    assert [line.partition(":")[0] for line in missed] == [
        f"{what}-{aligner}" for aligner in ("keys", "both") for what in ("perplexity", "time")
    ]
    assert missed[0] == "perplexity-keys: not measured: record: exit code 1"
    assert "found: time-rollout" in printed and "record: exit code 1 (0 s)" in printed
    late = script.run_suite(tmp_path, 0, "", "")
    assert late[0] == "perplexity-table: not measured: model: no time was left" and len(late) == 12


@pytest.mark.parametrize(
    ("high", "time", "won"),
    [(0.99, 1.05, True), (1.0, 0.9, False), (0.9, 1.06, False), (None, 1, False)],
)
def test_a_win_was_decided_beforehand(high, time, won):
    assert script.wins({"ratio_high": high}, {"ratio": time}) == won
