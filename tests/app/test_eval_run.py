"""Suites: commands checked first, finished cells kept, overrides, the shipped files."""

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from helpers.other_weights import change, copy_of

from kvalign.app.cli.arguments import parse
from kvalign.app.cli.catalogue import find
from kvalign.app.cli.main import main
from kvalign.app.commands.eval_run import parse_suite, read_suite
from kvalign.app.listing import suites
from kvalign.eval.report import read

SUITE = """
title: two cells
cells:
  - name: short
    command: eval perplexity --methods window --cache-sizes 16 --num-tokens 10
  - name: long
    command: >-
      eval perplexity --methods window,recompute --cache-sizes 16 --num-tokens 12
      --keep {out}/losses
"""


@pytest.fixture
def own(tmp_path, monkeypatch, undrawn):
    """A suite file in a folder of its own, and the commands that ran, in this process: one of
    their own takes seconds to begin, and what is killed has them anyway.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(SUITE)
    ran = []

    def run(words, **kwargs):
        ran.append(words[3:])
        monkeypatch.setattr("sys.stdin", kwargs["stdin"])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = main(words[3:])
        return subprocess.CompletedProcess(words, code, printed.getvalue())

    monkeypatch.setattr(
        "kvalign.app.commands.eval_run.subprocess", SimpleNamespace(run=run, PIPE=None)
    )
    return ran


def test_finished_cells_are_kept(own, tmp_path, capfd):
    argv = ["eval", "run", "own.yaml", "--out", "results", "--json"]
    assert main(argv) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["cells"] == {"short": "run", "long": "run"}
    assert "--keep results/losses" in captured.err and "{out}" not in captured.err
    assert re.search(r"== 1 of 2, short: .*\n== 2 of 2, about [\d:]{7} left, long: ", captured.err)
    found = read(tmp_path / "results").documents
    assert [len(found[name]["rows"]) for name in ("short", "long")] == [1, 2]
    assert found["long"]["command"].endswith(f"--keep {tmp_path}/results/losses")
    assert len(list((tmp_path / "results" / "losses").iterdir())) == 2
    (tmp_path / "results" / "short.json").unlink()
    shutil.move("results", "moved")  # a folder of results is whole in itself
    assert main(["eval", "run", "own.yaml", "--out", "moved"]) == 0
    captured = capfd.readouterr()
    assert "2 cells in moved, 1 of them from before" in captured.err
    assert captured.out == "report: moved/report.html\n" and len(own) == 3
    page = (tmp_path / "moved/report.html").read_text()
    assert "--keep moved/losses" in page and "{out}" not in page  # to be copied as they stand
    assert "Changed for this run" not in page


@pytest.mark.slow
def test_a_cell_is_kept_as_long_as_its_model_has_the_same_weights(own, tmp_path, capfd):
    folder = copy_of("llama-mini", tmp_path / "m")
    argv = ["eval", "run", "own.yaml", "--out", "results", "--override", "--model m"]

    def ran():
        before = len(own)
        assert main(argv) == 0
        return len(own) - before, capfd.readouterr().err

    def perplexity():
        return read(tmp_path / "results").documents["short"]["rows"][0]["perplexity"]

    assert ran()[0] == 2
    first = perplexity()
    assert ran()[0] == 0
    change(folder)
    num, said = ran()
    assert num == 2 and "short runs again: m has other weights now" in said
    assert perplexity() != first


@pytest.mark.slow
def test_overrides_reach_the_cells_that_have_the_flag(own, tmp_path, capfd):
    over = ["--override", "--num-tokens 15 --model llama-mini"]
    assert main(["eval", "run", "own.yaml", "--out", "results", *over]) == 0
    for document in read(tmp_path / "results").documents.values():
        assert document["rows"][0]["num_labels"] == 15
        assert document["settings"]["model"] == "llama-mini"
    page = (tmp_path / "results/report.html").read_text()
    assert "Changed for this run:</strong> <code>--num-tokens 15 --model llama-mini</code>" in page
    assert main(["eval", "run", "own.yaml", "--out", "results"]) == 2
    assert "has another command's result" in capfd.readouterr().err
    useless = ["--override", "--num-tokens 15 --num-turns 3"]
    assert main(["eval", "run", "own.yaml", "--out", "other", *useless]) == 2
    assert "has no cell with --num-turns" in capfd.readouterr().err


def test_another_model_leaves_the_aligners_of_a_suite_behind():
    for model, keeps in (("gpt2-mini", True), ("llama-mini", False)):
        cells = parse_suite(read_suite("quick"), "quick", f"--model {model}")
        assert cells == parse_suite(read_suite("quick"), "quick", variables=f"model={model}")
        assert {"--aligner" in cell.command for cell in cells} == {keeps}
    flags = ("--model llama-mini", "--aligner kvalign-llama-mini-table")
    for cell in parse_suite(read_suite("quick"), "quick", " ".join(flags)):
        assert all(flag in cell.command for flag in flags)


@pytest.mark.slow
def test_a_failed_cell_ends_the_run_and_keeps_the_rest(own, tmp_path, capfd):
    (tmp_path / "own.yaml").write_text(SUITE.replace("--num-tokens 12", "--num-tokens 99999999"))
    assert main(["eval", "run", "own.yaml", "--out", "results"]) == 1
    error = capfd.readouterr().err
    assert (
        "name a longer text, or smaller --num-tokens" in error
        and "error: exit code 2 of kvalign eval" in error
    )
    assert error.endswith("; finished cells are kept\n")
    assert sorted(p.name for p in (tmp_path / "results").glob("*.json")) == ["short.json"]


@pytest.mark.parametrize("name", suites())
def test_shipped_suites_are_understood(name):
    cells = parse_suite(read_suite(name), name)
    assert len(cells) >= (2 if name in ("quick", "recall") else 6)
    for cell in (cell.at("out") for cell in cells):  # by hand, and as its process gets it
        words = shlex.split(cell.command)
        assert words[0] == "kvalign" and "{out}" not in cell.command
        command, flags = find(words[1:])
        assert parse(command.settings, flags, "")[0] == cell.settings
        assert (
            command.settings(**json.loads(json.dumps(vars(cell.settings), default=str)))
            == cell.settings
        )
