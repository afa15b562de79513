"""Suites: commands checked first, finished cells kept, overrides, the shipped files, Ray."""

import contextlib
import io
import json
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
from helpers.smaller import output_of

from kvalign import checkpoints
from kvalign.app import suite
from kvalign.app.cli import main
from kvalign.app.commands.eval_run import RunSettings
from kvalign.eval.contents import paper_tables
from kvalign.eval.results_folder import Results, read
from kvalign.eval.suite_file import parse_suite_text

SUITE = """
title: two cells
cells:
  - name: short
    command: eval perplexity --methods window --cache-sizes 16 --num-tokens 20
  - name: long
    command: >-
      eval perplexity --methods window,recompute --cache-sizes 16 --num-tokens 30
      --keep {out}/losses
"""
SHIPPED = ("quick", "reference", "paper-distilgpt2", "paper-smollm2")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A suite file in a folder of its own, and the commands that ran, in this process: one of
    their own takes seconds to begin, and what is killed or runs on Ray has them anyway.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(SUITE)
    ran = []

    def run(words, **kwargs):
        ran.append(words[3:])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = main(words[3:])
        return subprocess.CompletedProcess(words, code, printed.getvalue())

    monkeypatch.setattr("kvalign.app.suite.subprocess", SimpleNamespace(run=run, PIPE=None))
    return ran


def run_here(command, out):
    """As `kvalign.app.suite.run_cell`, in this process."""
    words = [word.replace("{out}", str(out)) for word in shlex.split(command)][1:]
    return output_of([*words, "--json"])


def test_finished_cells_are_kept(own, tmp_path, capfd):
    argv = ["eval", "run", "own.yaml", "--out", "results", "--json"]
    assert main(argv) == 0
    assert json.loads(capfd.readouterr().out)["cells"] == {"short": "run", "long": "run"}
    found = read(tmp_path / "results").documents
    assert [len(found[name]["rows"]) for name in ("short", "long")] == [1, 2]
    assert found["long"]["command"].endswith("--keep '{out}/losses'")
    assert len(list((tmp_path / "results" / "losses").iterdir())) == 2
    (tmp_path / "results" / "short.json").unlink()
    shutil.move("results", "moved")  # a folder of results is whole in itself
    assert main(["eval", "run", "own.yaml", "--out", "moved"]) == 0
    captured = capfd.readouterr()
    assert "2 cells in moved, 1 of them from before" in captured.err
    assert captured.out == "report: moved/report.html\n" and len(own) == 3


def test_overrides_reach_the_cells_that_have_the_flag(own, tmp_path, capfd):
    over = ["--override", "--num-tokens 15 --model llama-mini"]
    assert main(["eval", "run", "own.yaml", "--out", "results", *over]) == 0
    for document in read(tmp_path / "results").documents.values():
        assert document["rows"][0]["num_labels"] == 15
        assert document["settings"]["model"] == "llama-mini"
    assert main(["eval", "run", "own.yaml", "--out", "results"]) == 2
    assert "has another command's result" in capfd.readouterr().err
    useless = ["--override", "--num-tokens 15 --num-turns 3"]
    assert main(["eval", "run", "own.yaml", "--out", "other", *useless]) == 2
    assert "has no cell with --num-turns" in capfd.readouterr().err


def test_a_failed_cell_ends_the_run_and_keeps_the_rest(own, tmp_path, capfd):
    (tmp_path / "own.yaml").write_text(SUITE.replace("--num-tokens 30", "--num-tokens 99999999"))
    assert main(["eval", "run", "own.yaml", "--out", "results"]) == 1
    error = capfd.readouterr().err
    assert "lower --num-tokens" in error and "error: exit code 2 of kvalign eval" in error
    assert error.endswith("; finished cells are kept\n")
    assert sorted(p.name for p in (tmp_path / "results").glob("*.json")) == ["short.json"]


@pytest.mark.slow
def test_killed_run_takes_up_where_it_was(own, tmp_path):
    """Killed in its second cell, after the first loss of it was kept."""
    code = (
        "import os, signal, kvalign.app.suite as s\n"
        "keep = s.keep\n"
        "def kept(*args):\n"
        "    keep(*args)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "s.keep = kept\n"
        "from kvalign.app.cli import main\n"
        "main(['eval', 'run', 'own.yaml', '--out', 'results'])\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert killed.returncode == -9
    first = (tmp_path / "results" / "short.json").read_bytes()
    assert not (tmp_path / "results" / "long.json").exists()
    own.clear()
    assert main(["eval", "run", "own.yaml", "--out", "results"]) == 0
    assert len(own) == 1 and "window,recompute" in own[0]
    assert (tmp_path / "results" / "short.json").read_bytes() == first


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cells: [", "suite own.yaml is not YAML"),
        ("- 1", "suite own.yaml: it: Input should be a valid dictionary"),
        ("cells: [{name: a}]", "suite own.yaml: cells.0.command: Field required"),
        ("title: a", "suite own.yaml: cells: Field required"),
        ("cells: [{name: a, command: 'eval chat \"'}]", "cell a: No closing quotation"),
        ("cells: [{name: a/b, command: eval chat}]", "letters, digits and -, got 'a/b'"),
        ("cells: [{name: a, command: eval chat}, {name: a, command: eval chat}]", "of one name"),
        ("cells: [{name: a, command: rm -rf /}]", "cell a: unknown command 'rm'"),
        ("cells: [{name: a, command: eval chat --num-turns 0}]", "--num-turns must be at least 1"),
        ("cells: [{name: a, command: eval chat --turns 1}]", "unrecognized arguments: --turns"),
        ("cells: [{name: a, command: eval chat word}]", "flags begin with --, got 'word'"),
    ],
)
def test_wrong_suites_are_one_line_before_any_work(own, tmp_path, capfd, text, message):
    (tmp_path / "own.yaml").write_text(text)
    assert main(["eval", "run", "own.yaml", "--out", "results"]) == 2
    error = capfd.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1
    assert own == [] and not (tmp_path / "results").exists()


def test_a_folder_of_another_suite_is_refused(own, tmp_path, capfd):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "suite.yaml").write_text("title: other")
    assert main(["eval", "run", "own.yaml", "--out", "results"]) == 2
    assert "has the results of another suite" in capfd.readouterr().err
    assert (tmp_path / "results" / "suite.yaml").read_text() == "title: other"


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_suites_are_understood(name):
    cells = suite.parse_suite(suite.read_suite(name), name)
    assert len(cells) >= 6 and all(cell.command.startswith("kvalign ") for cell in cells)
    paper = parse_suite_text(suite.read_suite(name), name).paper
    names = {cell.name for cell in cells}
    assert {table.cell for table in paper.tables} <= names
    assert bool(paper.tables) == name.startswith("paper")


def test_paper_figures_stand_beside_ours():
    paper = parse_suite_text(suite.read_suite("paper-distilgpt2"), "paper-distilgpt2")
    row = {"method": "recompute", "aligner": None, "cache_size": 64, "perplexity": 70.123}
    document = {"kind": "eval perplexity", "rows": [row]}
    tables = paper_tables(Results({"perplexity-wikitext": document}, paper))
    wikitext = next(t for t in tables if t.title.startswith("Perplexity, WikiText"))
    texts = {line[0].text: [entry.text for entry in line[1:]] for line in wikitext.rows}
    assert texts["recompute"][2:4] == ["75.60", "70.12"]
    assert texts["streaming-llm"][6:] == ["1980.30", "not run"]
    other = parse_suite_text(suite.read_suite("paper-smollm2"), "paper-smollm2").paper
    assert other.tables[0].rows["kvalign (network)"][255] == 137.13
    assert "swapped" in other.notes[0]


@pytest.mark.slow
def test_paper_suite_runs_on_local_copies_of_what_the_hub_has(tmp_path, monkeypatch, capfd):
    """The whole of it, small, on folders that stand for the model, texts and prompts."""

    def copy(path, rows):
        path.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(rows).to_parquet(path)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvalign.app.suite.run_cell", run_here)
    shutil.copytree(checkpoints.model_path("gpt2-mini"), tmp_path / "distilbert" / "distilgpt2")
    lines = [f" The island number {i} was settled by people of the sea . \n" for i in range(400)]
    talk = [{"messages": [{"role": "user", "content": line}]} for line in lines]
    wikitext = tmp_path / "Salesforce" / "wikitext"
    for split in ("train", "test"):
        copy(wikitext / "wikitext-103-raw-v1" / f"{split}-00000.parquet", {"text": lines})
    (wikitext / "README.md").write_text(
        "---\nconfigs:\n- config_name: wikitext-103-raw-v1\n  data_files:\n"
        "  - split: train\n    path: wikitext-103-raw-v1/train-*\n"
        "  - split: test\n    path: wikitext-103-raw-v1/test-*\n---\n"
    )
    everyday = tmp_path / "HuggingFaceTB" / "everyday-conversations-llama3.1-2k" / "data"
    for split in ("train_sft", "test_sft"):
        copy(everyday / f"{split}-00000-of-00001.parquet", talk)
    asked = [{"category": "x", "prompt": ["Write of an island.", "Again."]}] * 3
    prompts = tmp_path / "HuggingFaceH4" / "mt_bench_prompts" / "data"
    copy(prompts / "train-00000-of-00001.parquet", asked)
    small = (
        "--num-tokens 700 --chunk-len 64 --max-steps 3 --methods streaming-llm,kvalign,recompute "
        "--cache-sizes 32 --max-new-tokens 5 --num-prompts 1 --num-turns 2 --num-trials 1 "
        "--trial-len 2 --num-lines 20 --distances 0"
    )
    argv = ["eval", "run", "paper-distilgpt2", "--out", "results", "--override", small]
    assert main(argv) == 0, capfd.readouterr().err
    page = (tmp_path / "results" / "report.html").read_text()
    assert "Beside the paper" in page and "593.40" in page
    entries = paper_tables(read(tmp_path / "results"))[0].rows
    assert [e.text == "not run" for e in entries[0][1:]] == [False, False, *[False, True] * 3]


@pytest.mark.slow
@pytest.mark.ray
def test_cells_run_side_by_side_on_ray(own, tmp_path, capfd):
    pytest.importorskip("ray")
    assert main(["eval", "run", "own.yaml", "--out", "results", "--ray"]) == 0
    found = read(tmp_path / "results").documents
    assert [len(found[name]["rows"]) for name in ("short", "long")] == [1, 2]
    (tmp_path / "results" / "long.json").unlink()
    settings = RunSettings(suite="own.yaml", out=tmp_path / "results", ray=True)
    assert suite.run_suite(settings) == {"short": "kept", "long": "run"}
