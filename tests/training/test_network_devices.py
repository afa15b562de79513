"""Training on two devices: Lightning's DDP through the command's flags, two processes."""

import json
import subprocess
import sys

import pytest

from kvalign.aligners import Aligner
from kvalign.app.cli.main import main

DATA = "gen-data --num-tokens 2000 --chunk-len 64 --out data"
TRAIN = "train --target key --data data --accelerator cpu --max-steps 8 --batch-size 64"


@pytest.mark.slow
def test_two_processes_train_one_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(DATA.split()) == 0
    assert main(f"{TRAIN} --out one".split()) == 0
    two = [sys.executable, "-m", "kvalign", *f"{TRAIN} --devices 2 --out two".split()]
    subprocess.run(two, cwd=tmp_path, capture_output=True, check=True)
    assert Aligner.from_pretrained(tmp_path / "two").config.kind == "network"
    one, two = (
        json.loads((tmp_path / name / "config.json").read_text())["training"]["key"]
        for name in ("one", "two")
    )
    assert two["settings"]["devices"] == 2 and two["num_steps"] == one["num_steps"] == 8
    # The same validation rows; other training rows, as each step takes twice as many.
    assert two["input_label_mse"] == one["input_label_mse"]
    assert two["val_loss"] != one["val_loss"] and abs(two["val_loss"] / one["val_loss"] - 1) < 0.1
