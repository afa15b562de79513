"""Training on two devices: Lightning's DDP through the command's flags, two processes. What a
launcher left in the environment does not count.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from kvalign.aligners import Aligner
from kvalign.app.cli.main import main
from kvalign.training.network_fit import is_helper, leading

TRAIN = "train --target key --accelerator cpu --max-steps 8 --batch-size 16 --no-judge"
SLURM = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
OF_STEP = SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "node17", "MASTER_PORT": "none"}
BOTH = SLURM | TORCHRUN | {"SLURM_NTASKS": "1", "WORLD_SIZE": "1"}


@pytest.mark.parametrize("environment", [OF_STEP, BOTH])
def test_one_process_leads_whatever_is_in_the_environment(
    environment, recorded, tmp_path, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ) | {"MPLBACKEND": "agg"}
    assert main(f"{TRAIN} --data {recorded.folder} --out {tmp_path / 'out'}".split()) == 0
    assert dict(os.environ) == before


def test_only_a_process_of_the_leader_s_is_a_helper():
    with leading():
        assert not is_helper()
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            assert pool.submit(is_helper).result()
    assert "KVALIGN_LEADER" not in os.environ


@pytest.mark.slow
def test_two_processes_train_one_network(recorded, tmp_path):
    train = f"{TRAIN} --data {recorded.folder}"
    assert main(f"{train} --out {tmp_path / 'one'}".split()) == 0
    two = [sys.executable, "-m", "kvalign", *f"{train} --devices 2 --out two".split()]
    subprocess.run(two, cwd=tmp_path, env=os.environ | BOTH, capture_output=True, check=True)
    assert Aligner.from_pretrained(tmp_path / "two").config.kind == "network"
    one, two = (
        json.loads((tmp_path / name / "config.json").read_text())["training"]["key"]
        for name in ("one", "two")
    )
    assert two["settings"]["devices"] == 2 and two["num_steps"] == one["num_steps"] == 8
    # The same validation rows; other training rows, as each step takes twice as many.
    assert two["input_label_mse"] == one["input_label_mse"]
    assert two["val_loss"] != one["val_loss"] and abs(two["val_loss"] / one["val_loss"] - 1) < 0.1
