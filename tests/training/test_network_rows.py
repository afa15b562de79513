"""Batches of rows: each row once an epoch, with its place, in an order that can be resumed."""

from collections import Counter

import pytest
import torch
from helpers.tiny_store import NUM_SINKS
from torch.nn.functional import mse_loss

from kvalign.aligners import Move, NetworkAligner
from kvalign.aligners.entries import KV
from kvalign.training.kinds import NetworkSettings
from kvalign.training.network_fit import OPEN_SHARDS, InOrder, Shuffled, loss
from kvalign.training.network_run import config_for


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
