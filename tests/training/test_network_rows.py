"""Batches of rows: each row once an epoch, with its place, in an order that can be resumed."""

from collections import Counter

import pytest
import torch
from helpers.tiny_store import Recorded, record_tiny

from kvalign.data_gen.store import open_store
from kvalign.training.network_rows import OPEN_SHARDS, InOrder, RecordedRows, Shuffled


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Recorded:
    return record_tiny(tmp_path_factory.mktemp("recorded") / "caches")


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
        place = torch.stack(batch[2:], 1).tolist()
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


def test_batches_are_float32_of_at_most_the_asked_size(shards):
    sizes = []
    loader = Shuffled(shards, "key", 50, seed=0)
    for batch in loader:
        sizes.append(len(batch.stale))
        assert batch.stale.dtype == batch.aligned.dtype == torch.float32
    assert len(sizes) == len(loader)
    assert 25 < min(sizes) <= max(sizes) <= 50


def test_order_depends_on_seed_and_epoch_alone(shards):
    def order(seed):
        loader = Shuffled(shards, "key", 32, seed)
        return [[batch.stale.sum().item() for batch in loader] for _ in range(2)]

    assert order(0) == order(0)
    first, second = order(0)
    assert first != second
    assert first != order(1)[0]


@pytest.mark.parametrize("num_drawn", [0, 1, 5])
def test_state_continues_at_the_very_batch(shards, num_drawn):
    whole = Shuffled(shards, "value", 32, seed=3)
    num_drawn += len(whole)  # in the second epoch
    expected = [batch for _ in range(3) for batch in whole][num_drawn:]
    first = Shuffled(shards, "value", 32, seed=3)
    left = num_drawn
    while left:
        for _ in first:
            left -= 1
            if not left:
                break
    resumed = Shuffled(shards, "value", 32, seed=3)
    resumed.load_state_dict(first.state_dict())
    found = [batch for _ in range(2) for batch in resumed]
    assert len(found) == len(expected)
    assert all(
        torch.equal(a, b)
        for x, y in zip(found, expected, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_ranks_share_the_rows(shards):
    expected = places_one_by_one(shards, "key")
    in_order = [InOrder(shards, "key", 32, rank=r, world_size=3) for r in range(3)]
    assert sum((places(part) for part in in_order), Counter()) == expected
    shuffled = [Shuffled(shards, "key", 32, 0, rank=r, world_size=3) for r in range(3)]
    assert len({len(list(part)) for part in shuffled}) == 1
    for part in shuffled:
        part.drawn = 0
    assert sum((places(part) for part in shuffled), Counter()) <= expected


def test_too_few_batches_for_the_devices(recorded):
    rows = RecordedRows(recorded.store, "key", 10**6)
    with pytest.raises(
        ValueError, match="--batch-size 1000000 leaves no batch for each of 99 devices"
    ):
        rows.num_batches(99)


def test_no_validation_data(recorded, monkeypatch):
    store = open_store(recorded.folder)
    monkeypatch.setattr(type(store), "shards", lambda self, split: [] if split == "val" else [1])
    with pytest.raises(ValueError, match="has no val shards"):
        RecordedRows(store, "key", 32)
