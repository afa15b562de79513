"""Training networks: batches with each row once, in an order that can be resumed; equalities of the
network; what training keeps, resumes and refuses, whatever a launcher left in the environment.
"""

import copy
import os
from collections import Counter

import pytest
import torch
from helpers.tiny_store import NUM_SINKS, bytes_tokenizer
from torch.nn.functional import mse_loss

from kvalign.aligners import Aligner, Move, NetworkAligner
from kvalign.aligners.entries import KV
from kvalign.app.cli.main import main
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.models.model_folder import quiet
from kvalign.training import network_fit, network_run, train_network, tune_network
from kvalign.training.network_fit import (
    BEST,
    OPEN_SHARDS,
    InOrder,
    Shuffled,
    best_weights,
    loss,
    losses,
)
from kvalign.training.network_run import config_for
from kvalign.training.settings import NetworkSettings


@pytest.fixture
def shards(recorded):
    shards = recorded.store.shards("train")
    assert {s.num_evicted for s in shards} == {1, 2}
    assert len(shards) > OPEN_SHARDS
    return shards


def places(batches) -> Counter:
    """How often each (vector, label, position, layer, head) comes."""
    rows = Counter()
    for batch in batches:
        place = torch.stack(batch[2:5], 1).tolist()
        columns = zip(batch.stale.tolist(), batch.aligned.tolist(), place, strict=True)
        rows.update((tuple(stale), tuple(aligned), *where) for stale, aligned, where in columns)
    return rows


def places_one_by_one(shards, kv) -> Counter:
    rows = Counter()
    for shard in shards:
        stale, aligned = (t.float() for t in shard.tensors(kv))
        for chunk, layer, head, slot in torch.cartesian_prod(
            *map(torch.arange, stale.shape[:4])
        ).tolist():
            pair = (tuple(t[chunk, layer, head, slot].tolist()) for t in (stale, aligned))
            rows[(*pair, slot, layer, head)] += 1
    return rows


@pytest.mark.parametrize("kv", ["key", "value"])
@pytest.mark.parametrize("batch_size", [7, 64, 10**6])
def test_every_row_comes_once_with_its_place(shards, kv, batch_size):
    expected = places_one_by_one(shards, kv)
    shuffled = Shuffled(shards, kv, batch_size, seed=0)
    assert places(InOrder(shards, kv, batch_size)) == expected
    assert places(shuffled) == expected  # first epoch
    assert places(shuffled) == expected  # second


def test_moves_of_a_batch_are_those_of_the_aligner(recorded):
    """A row of shift 2 goes through the network twice, as an entry of a stream does."""
    torch.manual_seed(0)
    store = recorded.store
    aligner = NetworkAligner(config_for(store, NetworkSettings(data=recorded.folder, out="unused")))
    assert aligner.config.shifts == (1,)
    torch.nn.init.normal_(aligner.key.fc3.weight, std=0.1)
    shard = next(shard for shard in store.shards("val") if shard.num_evicted == 2)
    stale, aligned = (x.float() for x in shard.tensors("key"))
    places = torch.arange(NUM_SINKS, NUM_SINKS + stale.shape[3])
    moved = [
        aligner.realign(layer, KV(*[stale[:, layer]] * 2), Move(2, NUM_SINKS, places)).keys
        for layer in range(stale.shape[1])
    ]
    (batch,) = InOrder([shard], "key", 10**6)
    batch = batch._replace(shift=1, num_moves=2)
    expected = mse_loss(torch.stack(moved, dim=1), aligned)
    assert torch.allclose(loss(aligner.key, batch), expected)
    assert not torch.allclose(loss(aligner.key, batch._replace(num_moves=1)), expected)


@pytest.fixture
def make_settings(recorded, tmp_path):
    """Settings of a small, quick run into a new folder."""

    def make(**changes) -> NetworkSettings:
        small = dict(data=recorded.folder, out=tmp_path / "aligner", accelerator="cpu")
        small |= dict(key_hidden1=8, key_hidden2=6, value_hidden1=6, value_hidden2=8)
        small |= dict(position_dim=4, layer_dim=2, head_embed_dim=3, batch_size=32, max_epochs=1)
        return NetworkSettings(**small | changes)

    return make


def weights(aligner: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in aligner.state_dict().items()}


def assert_equal(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("kv", ["key", "value"])
def test_zero_initialised_loss_is_the_input_label_mse(recorded, make_settings, kv):
    store = recorded.store
    aligner = NetworkAligner(config_for(store, make_settings()))
    shards = store.shards("train") + store.shards("val")
    realigned, unchanged = losses(getattr(aligner, kv), InOrder(shards, kv, 100))
    assert realigned == unchanged
    num_rows = {
        shift: sum(s.num_rows for s in shards if s.num_evicted == shift) for shift in store.shifts
    }
    by_shift = store.manifest.input_label_mse[kv]
    mse = sum(by_shift[shift] * n for shift, n in num_rows.items()) / sum(num_rows.values())
    assert unchanged == pytest.approx(mse, rel=1e-5)


@pytest.mark.slow
def test_training_lowers_the_loss_and_saves_what_it_measured(recorded, make_settings):
    settings = make_settings(max_epochs=6, lr=0.01)
    results = train_network(settings)
    aligner = Aligner.from_pretrained(settings.out)
    aligner.check(recorded.model, CacheSizes(15, 4, 1))
    for kv, found in results.items():
        assert found["val_loss"] < 0.97 * found["input_label_mse"]
        assert found["ratio"] == found["val_loss"] / found["input_label_mse"]
        batches = InOrder(recorded.store.shards("val"), kv, 8192)
        # Float32 sums in another order on another processor; the file itself is exact.
        assert losses(getattr(aligner, kv), batches) == pytest.approx(
            (found["val_loss"], found["input_label_mse"]), rel=1e-6
        )
    assert aligner.config.training == results
    card = (settings.out / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert f"{results['key']['val_loss']:.4g}" in card


@pytest.mark.parametrize("num_steps", [34, pytest.param(68, marks=pytest.mark.slow)])
def test_interrupted_and_resumed_ends_in_the_same_weights(
    make_settings, tmp_path, monkeypatch, num_steps
):
    """Stopped before a report, at an epoch's end, and in the second network's run."""
    undisturbed = make_settings(out=tmp_path / "undisturbed", max_epochs=2)
    expected = train_network(undisturbed)
    disturbed = make_settings(max_epochs=2)

    with monkeypatch.context() as patch:
        count, step = iter(range(num_steps)), network_fit.Realignment.training_step

        def training_step(self, batch, batch_idx):
            if next(count, None) is None:
                raise KeyboardInterrupt
            return step(self, batch, batch_idx)

        patch.setattr(network_fit.Realignment, "training_step", training_step)
        with pytest.raises(KeyboardInterrupt):
            train_network(disturbed)
    assert not (disturbed.out / "config.json").exists()
    found = train_network(disturbed)
    assert_equal(
        weights(Aligner.from_pretrained(disturbed.out)),
        weights(Aligner.from_pretrained(undisturbed.out)),
    )
    for kv in expected:
        for name in ("val_loss", "num_steps"):
            assert found[kv][name] == expected[kv][name]


def test_finished_is_not_overwritten_unless_asked(make_settings, monkeypatch):
    results = train_network(make_settings(max_steps=3))
    before = weights(Aligner.from_pretrained(make_settings().out))
    with pytest.raises(FileExistsError, match="already holds a trained key and value aligner"):
        train_network(make_settings(max_steps=3, lr=1e-3))
    with monkeypatch.context() as patch:
        patch.setattr(network_run, "fit", None)  # the same once more trains nothing
        assert train_network(make_settings(max_steps=3)) == results
        assert train_network(make_settings(max_steps=3, target="value")).keys() == {"value"}
    assert_equal(weights(Aligner.from_pretrained(make_settings().out)), before)
    train_network(make_settings(max_steps=3, lr=1e-3, overwrite=True))
    after = weights(Aligner.from_pretrained(make_settings().out))
    assert not torch.equal(after["key.fc3.weight"], before["key.fc3.weight"])


def test_network_that_does_no_better_than_none_is_not_used(recorded, make_settings, monkeypatch):
    """What is saved leaves entries as they are, and says so; the measured loss stays as it was."""

    def worse(net, batches, losses=losses):
        _, unchanged = losses(net, batches)
        return 1.5 * unchanged, unchanged

    monkeypatch.setattr(network_run, "losses", worse)
    settings = make_settings(target="key")
    result = train_network(settings)["key"]
    assert result["ratio"] == 1.5
    assert result["used"] is False
    aligner = Aligner.from_pretrained(settings.out)
    x = torch.randn(1, 2, 5, aligner.config.head_dim)
    assert not aligner.key.correction(x, 0).any()
    assert "| 1.5 | no |" in (settings.out / "README.md").read_text()
    kept = make_settings(target="key", judge=False, out=settings.out.parent / "kept")
    assert train_network(kept)["key"]["used"] is True
    assert Aligner.from_pretrained(kept.out).key.correction(x, 0).any()


def test_a_recording_of_other_weights_is_refused(recorded, make_settings, tmp_path, monkeypatch):
    """For networks and for sweeps, where the model is here to compare with."""
    monkeypatch.chdir(tmp_path)
    bytes_tokenizer().save_pretrained("tiny")
    model = copy.deepcopy(recorded.model)
    with quiet():
        model.save_pretrained("tiny")
    (result, _) = train_network(make_settings()).values()
    assert result["data"]["identity"] == recorded.store.config.identity
    model.transformer.h[1].mlp.c_proj.weight.data[2, 3] += 1
    with quiet():
        model.save_pretrained("tiny")
    for begin in (
        lambda: train_network(make_settings()),
        lambda: tune_network(target="key", data=recorded.folder, out=tmp_path / "sweep"),
    ):
        with pytest.raises(UserError, match="recorded with other weights than tiny has now"):
            begin()


def test_weights_that_would_run_code_are_refused(tmp_path):
    torch.save({"state_dict": print}, tmp_path / BEST)
    with pytest.raises(Exception, match="[Ww]eights"):
        best_weights(torch.nn.Linear(1, 1), tmp_path)


TRAIN = "train --target key --accelerator cpu --max-steps 8 --batch-size 16 --no-judge"
SLURM = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
OF_STEP = SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "node17", "MASTER_PORT": "none"}
BOTH = SLURM | TORCHRUN | {"SLURM_NTASKS": "1", "WORLD_SIZE": "1"}


@pytest.mark.parametrize("environment", [OF_STEP, BOTH])
def test_one_process_trains_whatever_is_in_the_environment(
    environment, recorded, tmp_path, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ) | {"MPLBACKEND": "agg"}
    assert main(f"{TRAIN} --data {recorded.folder} --out {tmp_path / 'out'}".split()) == 0
    assert dict(os.environ) == before
