"""The script of the suite `learned-positions`: its form for a CPU, made smaller still."""

import pytest
from helpers.smaller import TEXT

from kvalign.app.suites.cells import parse_suite, read_suite
from scripts import learned_positions as script


@pytest.mark.slow
def test_every_row_of_the_small_form_is_there(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(script, "STEP_MINUTES", 10)  # the machine may be busy
    (tmp_path / "words.txt").write_text(TEXT)
    less = f"text=text:{tmp_path / 'words.txt'} layers=2 hidden=64 context=64 vocabulary=300 "
    less += "minutes=0.05 length=59 sizes=8,58 table_tokens=3000 recorded=600 shifts=1,8 steps=5 "
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
