"""Recording by several workers: the same bytes, also when one of them dies; one run a folder."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from helpers.tiny_corpus import TEXT

from kvalign.app.cli.main import main
from kvalign.data_gen.store import open_store
from kvalign.foundation.files import locked

ARGV = [
    *("gen-data", "--corpus", "text:words.txt", "--num-tokens", "3000", "--chunk-len", "64"),
    *("--shard-mb", "0.5", "--out"),
]


@pytest.fixture(autouse=True)
def in_folder_with_words(tmp_path, monkeypatch):
    (tmp_path / "words.txt").write_text(TEXT * 4)
    monkeypatch.chdir(tmp_path)


def bytes_of(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != ".lock"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process records; its own threads are given back."""
    folder, num_threads = tmp_path_factory.mktemp("alone"), torch.get_num_threads()
    (folder / "words.txt").write_text(TEXT * 4)
    with contextlib.chdir(folder):
        assert main([*ARGV, "out"]) == 0
    folder = folder / "out"
    assert torch.get_num_threads() == num_threads
    assert len(list(folder.glob("*.safetensors"))) >= 6
    return bytes_of(folder)


@pytest.mark.ray
@pytest.mark.slow
def test_workers_write_the_same_bytes_also_when_one_dies(alone, tmp_path):
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "kvalign", *ARGV, "out", "--workers", "2"]
    run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    while run.poll() is None:
        time.sleep(0.05)
        if list(tmp_path.glob("out/*.safetensors")) and (workers := _workers_of(run.pid)):
            os.kill(workers[0], signal.SIGKILL)
            break
    else:
        raise AssertionError("it has ended before one was killed")
    assert run.wait() == 0
    assert bytes_of(tmp_path / "out") == alone
    open_store(tmp_path / "out", verify=True)


def _workers_of(pid):
    """Processes below `pid` that Ray calls by our class."""
    below = psutil.Process(pid).children(recursive=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        return [one.pid for one in below if "".join(one.cmdline()).startswith("ray::_Worker")]


@pytest.mark.parametrize(
    "argv",
    [
        [*ARGV, "out"],
        ["pretrain", "--out", "out", "--num-tokens", "1000", "--vocab-size", "300"],
        ["eval", "run", "quick", "--out", "out"],
    ],
    ids=lambda argv: argv[0],
)
def test_two_runs_into_one_folder_are_refused(argv, capfd):
    with locked(Path("out")):
        assert main(argv) == 2
    assert "another run is writing to out" in capfd.readouterr().err
    assert [p.name for p in Path("out").iterdir()] == [".lock"]
