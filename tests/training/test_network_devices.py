"""Training on two devices: Lightning's DDP through the command's flags, two processes. What a
launcher left in the environment does not count.
"""

import json
import os
import subprocess
import sys

import pytest
from helpers.tiny_store import record_tiny

from kvalign.aligners import Aligner
from kvalign.app.cli.main import main
from kvalign.training.network_fit import is_helper, leading

DATA = "gen-data --num-tokens 1000 --chunk-len 64 --out data"
TRAIN = "train --target key --data data --accelerator cpu --max-steps 8 --batch-size 64 --no-judge"
SLURM = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "node17", "MASTER_PORT": "none"}
ONE = [
    {},
    SLURM | {"SLURM_NTASKS": "1"},
    SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},
    TORCHRUN | {"WORLD_SIZE": "1"},
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return record_tiny(tmp_path_factory.mktemp("recorded") / "data").folder


@pytest.mark.parametrize("environment", ONE)
def test_one_process_leads_whatever_is_in_the_environment(environment, data, tmp_path, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ) | {"MPLBACKEND": "agg"}
    flags = f"--data {data} --out {tmp_path / 'out'}"
    assert main(f"train {flags} --accelerator cpu --max-steps 2 --no-judge".split()) == 0
    assert dict(os.environ) == before


def test_only_a_process_of_the_leader_s_is_a_helper():
    asks = "from kvalign.training.network_fit import is_helper; print(is_helper())"
    with leading():
        assert not is_helper()
        said = subprocess.run([sys.executable, "-c", asks], capture_output=True, check=True)
    assert said.stdout == b"True\n"
    assert "KVALIGN_LEADER" not in os.environ


@pytest.mark.slow
def test_two_processes_train_one_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(DATA.split()) == 0
    assert main(f"{TRAIN} --out one".split()) == 0
    two = [sys.executable, "-m", "kvalign", *f"{TRAIN} --devices 2 --out two".split()]
    environment = os.environ | SLURM | TORCHRUN | {"SLURM_NTASKS": "1", "WORLD_SIZE": "1"}
    subprocess.run(two, cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert Aligner.from_pretrained(tmp_path / "two").config.kind == "network"
    one, two = (
        json.loads((tmp_path / name / "config.json").read_text())["training"]["key"]
        for name in ("one", "two")
    )
    assert two["settings"]["devices"] == 2 and two["num_steps"] == one["num_steps"] == 8
    # The same validation rows; other training rows, as each step takes twice as many.
    assert two["input_label_mse"] == one["input_label_mse"]
    assert two["val_loss"] != one["val_loss"] and abs(two["val_loss"] / one["val_loss"] - 1) < 0.1
