"""Readers of files that came from somewhere: anything but a whole, fitting file is one UserError,
before memory is taken for it.
"""

import json
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.refusals import refused
from helpers.results_example import documents

from kvalign import checkpoints
from kvalign.app.cli.main import main


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recording") / "r"
    assert main(["gen-data", "--num-tokens", "600", "--chunk-len", "64", "--out", str(folder)]) == 0
    return folder


@pytest.mark.slow
def test_kept_losses_that_no_model_has(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("The island was settled in the year of the flood. " * 40)
    argv = ["eval", "perplexity", "--methods", "window", "--cache-sizes", "16", "--num-tokens"]
    argv += ["50", "--corpus", f"text:{tmp_path}/text", "--keep", str(tmp_path)]
    assert main(argv) == 0
    capfd.readouterr()
    (path,) = tmp_path.glob("*.parquet")
    table = pq.read_table(path)
    for wrong in (float("nan"), float("inf"), 1e30, "text", None):
        column = pa.array([wrong] * len(table))
        pq.write_table(table.set_column(1, "nll_nats", column), path, write_page_checksum=True)
        refused(argv, f"{path} is damaged", capfd)


@pytest.mark.parametrize("how", ["pipe", "folder", "device", "loop"])
def test_shards_that_are_no_files(how, recording, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(recording, "r")
    shard = sorted((tmp_path / "r").glob("*.safetensors"))[0]
    shard.unlink()
    make = {"pipe": os.mkfifo, "folder": os.mkdir}.get(how)
    make(shard) if make else os.symlink("/dev/zero" if how == "device" else shard.name, shard)
    refused(["train", "--data", "r", "--out", "a"], "is damaged (it is missing)", capfd)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: [row | {"method": "m" * 5000} for row in rows],
        lambda rows: [row | {"aligner": "a" * 50_000} for row in rows],
        lambda rows: [rows[0] | {"method": f"m{i}"} for i in range(500)],
        lambda rows: (rows * 5000)[:10_000],
    ],
)
def test_results_that_no_page_can_show(change, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r").mkdir()
    document = documents()["perplexity"]
    (tmp_path / "r" / "p.json").write_text(
        json.dumps(document | {"rows": change(document["rows"])})
    )
    refused(["report", "r"], "is not a document of `kvalign eval --json`: ", capfd)


def test_pickles_of_code_are_not_run(tmp_path):
    """A checkpoint that would run code when it is unpickled is refused."""
    from kvalign.training.network_fit import BEST, best_weights

    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    torch.save({"state_dict": Evil()}, tmp_path / BEST)
    with pytest.raises(Exception, match="[Ww]eights"):
        best_weights(torch.nn.Linear(1, 1), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    ["generate --model model --prompt Hi", "chat --state model/model.safetensors --say Hi"],
)
def test_files_of_terabytes(argv, tmp_path, monkeypatch, capfd):
    """With a hole in place of weights."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoints.model_path("gpt2-mini"), "model")
    os.truncate("model/model.safetensors", 2**41)
    refused(argv.split(), "model.safetensors", capfd)
