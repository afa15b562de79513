"""Suites: commands checked first, finished cells kept, overrides, the shipped files, their time."""

import contextlib
import dataclasses
import io
import json
import shlex
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from helpers.other_weights import change, copy_of
from helpers.results_example import documents

from kvalign.app.cli.arguments import parse
from kvalign.app.cli.catalogue import find
from kvalign.app.cli.main import main
from kvalign.app.listing import suites
from kvalign.app.suites import forecast
from kvalign.app.suites.forecast import DATA_SET, lacks_of
from kvalign.app.suites.suite import parse_suite, read_suite
from kvalign.eval.evaluations.perplexity import PerplexitySettings
from kvalign.eval.report import parse_suite_text, read

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
    their own takes seconds to begin, and what is killed or runs on Ray has them anyway.
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

    monkeypatch.setattr("kvalign.app.suites.suite.subprocess", SimpleNamespace(run=run, PIPE=None))
    return ran


def test_finished_cells_are_kept(own, tmp_path, capfd):
    argv = ["eval", "run", "own.yaml", "--out", "results", "--json"]
    assert main(argv) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["cells"] == {"short": "run", "long": "run"}
    assert "--keep results/losses" in captured.err and "{out}" not in captured.err
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
    shutil.rmtree(folder)
    assert ran()[0] == 0, "which weights it had is not known here"
    copy_of("gpt2-mini", folder)
    for path in (tmp_path / "results").glob("*.json"):
        document = json.loads(path.read_text())
        del document["identity"]
        path.write_text(json.dumps(document))
    num, said = ran()
    assert num == 0 and "2 cells in results were finished by kvalign 0.2" in said


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
        assert {"--aligner" in cell.command for cell in cells} == {keeps}
    named = "--model llama-mini --aligner kvalign-llama-mini-table"
    assert all(named in cell.command for cell in parse_suite(read_suite("quick"), "quick", named))


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


AWAY = """
variables: {model: someone/model, corpus: paper-wikitext, prompts: mt-bench}
prepare:
  - {name: caches, command: 'gen-data --model {model} --corpus {corpus} --out {out}/caches'}
  - {name: network, command: 'train --data {out}/caches --out {out}/network'}
  - {name: table, command: 'train table --out {out}/table'}
cells:
  - {name: of-network, command: 'eval perplexity --aligner {out}/table,{out}/network'}
  - {name: of-prompts, command: 'eval chat --prompts {prompts}'}
  - {name: of-table, command: 'eval perplexity --aligner {out}/table'}
"""


@pytest.fixture
def away(tmp_path, monkeypatch, offline):
    """A suite that asks the hub, which is away, and the commands that ran, or seem to."""
    ran = []

    def run_cell(cell):
        ran.append(cell)
        return json.dumps(documents()["perplexity"] if "perplexity" in cell.kind.name else {})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvalign.app.suites.suite.run_cell", run_cell)
    monkeypatch.setattr("kvalign.eval.write_report", lambda folder: folder / "report.html")
    (tmp_path / "own.yaml").write_text(AWAY)
    return ran


def test_what_the_hub_has_is_left_out_when_it_is_away(away, capfd):
    """And what needs its output, however far; the first line helps, the last lists them."""
    argv = ["eval", "run", "own.yaml", "--out", "results"]
    assert main([*argv, "--json"]) == 1
    captured = capfd.readouterr()
    left_out = dict.fromkeys(("caches", "network", "of-network", "of-prompts"), "not run")
    printed = json.loads(captured.out)
    assert printed["cells"] == {**left_out, "table": "run", "of-table": "run"}
    assert printed["report"] == "results/report.html"
    first, *_, last = captured.err.strip().splitlines()
    for words in (
        "which does not answer: model someone/model, data set HuggingFaceH4/mt_bench",
        "`hf download NAME --local-dir NAME`",
        '--variables "model=FOLDER corpus=text:FILE prompts=own"',
    ):
        assert words in first
    assert last.startswith("kvalign eval run: error: 4 of 6 cells were not run")
    assert last.endswith("caches, network, of-network, of-prompts")
    assert main(argv) == 1 and len(away) == 2  # what is finished is kept


def test_a_suite_that_can_run_nothing_says_so_alone(away, tmp_path, capfd):
    for name in ("paper-distilgpt2", "paper-smollm2"):
        assert main(["eval", "run", name, "--out", "results"]) == 2
        error = capfd.readouterr().err
        assert error.startswith("kvalign eval run: error: not here or on the hub")
        assert len(error.splitlines()) == 1 and "prompts=own" in error
    assert away == [] and not (tmp_path / "results").exists()


def test_variables_name_what_is_here(away, tmp_path):
    """Folders in place of the hub's, or of the same names; nothing is asked for that is known."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "Salesforce" / "wikitext").mkdir(parents=True)
    changed = "model=folder prompts=own"
    prompts = {(DATA_SET, "HuggingFaceH4/mt_bench_prompts")}
    for variables, found in ((changed, {}), ("model=llama-mini", {"of-prompts": prompts})):
        cells = parse_suite(AWAY, "own.yaml", variables=variables)
        assert lacks_of({cell.name: cell.settings for cell in cells}) == found


@pytest.mark.parametrize("name", suites())
def test_shipped_suites_are_understood(name):
    cells = parse_suite(read_suite(name), name)
    assert len(cells) >= (2 if name in ("quick", "recall") else 6)
    for cell in (cell.at("out") for cell in cells):  # by hand, and as its process gets it
        words = shlex.split(cell.command)
        assert words[0] == "kvalign" and "{out}" not in cell.command
        command, flags = find(words[1:])
        assert parse(command.settings, flags, "")[0] == cell.settings
        assert command.settings(**json.loads(cell.as_json())) == cell.settings
    paper = parse_suite_text(read_suite(name), name).paper
    names = {cell.name for cell in cells}
    assert {table.cell for table in paper.tables} <= names
    assert bool(paper.tables) == name.startswith("paper")


def steps_of(name, variables=""):
    return {x.name: x.settings for x in parse_suite(read_suite(name), name, "", variables)}


def test_steps_and_tokens_are_those_of_the_commands():
    works = {name: forecast.work_of(x) for name, x in steps_of("paper-distilgpt2").items()}
    # Window, streaming-llm and discard-half step once, and each of three aligners twice.
    read = 33 + 65 + 129 + 256
    assert works["perplexity-wikitext"] == (4 * 20_000 * (3 + 3 * 2), 20_000 * read)
    assert works["latency"] == (4 * 3 * 5000 * (3 + 2 * 2), 3 * 5000 * read)
    assert works["readability"] == (10_000 * (3 + 2 * 2), 10_000 * 65)
    assert works["caches"] == (0, 50_000 // 32 * 256 * 2)
    stepwise = PerplexitySettings(methods=("window",), num_tokens=100, stepwise=True)
    assert forecast.work_of(stepwise) == (100, 0)
    assert forecast.work_of(dataclasses.replace(stepwise, stepwise=False)) == (0, 100)


def test_a_long_suite_says_its_hours_and_a_short_one_nothing(monkeypatch):
    monkeypatch.setattr(forecast, "speeds", lambda settings: (0.036, 0.0, "cpu"))
    long = steps_of("paper-distilgpt2")
    num_steps = sum(forecast.work_of(settings)[0] for settings in long.values())
    line = forecast.estimate(long)
    assert line.startswith(f"about {num_steps / 1e5:.1f} hours on cpu, without the training of net")
    assert forecast.estimate(steps_of("quick")) == forecast.estimate({}) == ""


def test_what_is_measured_is_a_step_and_a_token(tmp_path):
    (settings, *_) = steps_of("quick").values()
    step_s, token_s, device = forecast.speeds(settings)
    assert 0 < token_s < step_s < 10 and device in ("cpu", "cuda")
    missing = steps_of("paper-distilgpt2", f"model={tmp_path}")
    assert forecast.estimate(missing) == ""
