"""The paper's suites: its number of rows, whole on local copies; and the one of a larger model."""

import os
import shlex
from pathlib import Path

import pytest
from helpers.hub_data import write_data_set
from helpers.smaller import INSIDE, TEXT, one_trial, output_of
from helpers.tiny_models import tiny_model
from transformers import AutoTokenizer

from kvalign import checkpoints
from kvalign.aligners import Aligner
from kvalign.app.cli.main import main
from kvalign.app.commands.eval_run import parse_suite, read_suite
from kvalign.data_gen.recording import split_of
from kvalign.data_gen.settings import RecordSettings
from kvalign.eval.report import read

LINES = [f" The island number {i} was settled by people of the sea . \n" for i in range(400)]
SMALL = (
    "--max-steps 3 --chunk-len 66 --cache-sizes 64 --methods streaming-llm,kvalign,recompute "
    "--max-new-tokens 5 --num-prompts 1 --num-seeds 1 --num-trials 1 --generate 3 --trial-len 2 "
    "--num-tokens 680 --num-lines 10 --distances 0"
)


def run_here(cell):
    """As `eval_run.Cell.output`, here; fewer tokens are scored than recorded."""
    fewer = ["--num-tokens", "20"] if "perplexity" in cell.kind.name else []
    return output_of([*shlex.split(cell.command)[1:], *fewer, "--json"])


def cells_of(name):
    return {cell.name: shlex.split(cell.command) for cell in parse_suite(read_suite(name), name)}


@pytest.mark.parametrize(
    ("name", "heads"), [("paper-distilgpt2", 6 * 12), ("paper-smollm2", 30 * 3)]
)
def test_more_rows_are_recorded_than_in_the_paper(name, heads):
    """Chunks of 256 tokens with four sinks and one evicted have 251 rows a head."""
    flags = cells_of(name)["caches"]
    assert flags[flags.index("--stride") + 1] == "32"
    num_chunks = (RecordSettings(out=Path("x")).num_tokens - 256) // 32 + 1
    trained = [n for n in range(num_chunks) if split_of(n, 256, 32, 0.1, 0) == "train"]
    assert "--num-tokens" not in flags and len(trained) * heads * 251 > 20e6


@pytest.fixture
def hub(tmp_path, monkeypatch, undrawn):
    """The working folder, with folders that stand for what the suites take from the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvalign.app.commands.eval_run.Cell.output", run_here)
    for name in ("training.judge.ROW_LABELS", "eval.evaluations.latency.timing._peak_mb"):
        monkeypatch.setattr(f"kvalign.{name}", INSIDE[f"kvalign.{name}"])
    monkeypatch.setattr("kvalign.training.sweep.run_trials", one_trial)
    tokenizer = AutoTokenizer.from_pretrained(checkpoints.model_path("gpt2-mini"))
    sizes = {"vocab_size": len(tokenizer)}
    for files in (tiny_model("gpt2", **sizes, n_positions=1024), tokenizer):
        files.save_pretrained(tmp_path / "distilbert/distilgpt2")
    lines = [{"text": line} for line in LINES]
    talk = [{"messages": [{"role": "user", "content": line}]} for line in LINES]
    asked = [{"category": "x", "prompt": ["Write of an island.", "Again."]}] * 3
    for name, config, splits in (
        ("Salesforce/wikitext", "wikitext-103-raw-v1", {"train": lines, "test": lines}),
        ("HuggingFaceTB/smoltalk", "everyday-conversations", {"train": talk}),
        ("HuggingFaceH4/mt_bench_prompts", "default", {"train": asked}),
    ):
        write_data_set(tmp_path / name, config, splits)
    return tmp_path


@pytest.mark.slow
def test_paper_suite_runs_whole(hub, capfd):
    """The other suite's commands are of the same kinds, and test_eval_run.py reads them."""
    name = "paper-distilgpt2"
    argv = ["eval", "run", name, "--out", "results", "--override", SMALL]
    assert main(argv) == 0, capfd.readouterr().err
    results = read(hub / "results")
    assert (hub / "results" / "report.html").exists()
    assert {"tune-keys.json", "tune-values.json"} <= {*os.listdir(hub / "results" / "prepared")}
    assert results.documents.keys() == {
        cell for cell in cells_of(name) if "eval" in cells_of(name)[cell]
    }
    sizes = Aligner.from_pretrained(hub / "results" / "network").config.sizes
    assert (sizes["key_hidden1"], sizes["key_hidden2"]) == (256, 64)
    assert (sizes["value_hidden1"], sizes["value_hidden2"]) == (64, 128)
    capfd.readouterr()
    assert main(argv) == 0
    cells = len(cells_of(name))
    assert f"{cells} cells in results, {cells} of them from before" in capfd.readouterr().err


@pytest.mark.slow
def test_every_row_of_learned_positions_is_there(hub, monkeypatch):
    monkeypatch.setattr(
        "kvalign.app.commands.eval_run.Cell.output",
        lambda cell: output_of([*shlex.split(cell.command)[1:], "--json"]),
    )
    (hub / "words.txt").write_text(TEXT)
    small = "text=text:words.txt layers=2 hidden=64 context=64 vocabulary=300 rows=8 minutes=0.01 "
    small += "length=59 sizes=8,58 table_tokens=3000 recorded=600 shifts=1,8 steps=5 trials=1 "
    small += "residual_steps=1 labels=60 labels_of_networks=12"
    argv = ["eval", "run", "learned-positions", "--out", "results", "--variables", small]
    assert main([*argv, "--override", "--trial-len 5"]) == 0
    found = read(hub / "results").documents
    for aligner in ("table", "keys", "both", "rollout", "residual"):
        for what, figure in (("perplexity", "ratio_low"), ("time", "ratio")):
            rows = {
                row["cache_size"]: row
                for row in found[f"{what}-{aligner}"]["rows"]
                if row["method"] == "kvalign"
            }
            assert rows.keys() == {8, 58} and all(figure in row for row in rows.values())
    of_table = {row["method"] for row in found["perplexity-table"]["rows"]}
    assert of_table == {"window", "streaming-llm", "discard-half", "kvalign"}
