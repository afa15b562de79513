"""Position tables: placed from birth, so nothing adds up; and the network on top of them."""

from typing import NamedTuple

import pytest
import torch
from helpers.methods import CACHE_SIZE, anchored, make, step, tables
from helpers.pairwise import one_of_each
from helpers.tiny_models import tiny_model


def test_zero_tables_are_streaming_llm(model, ids):
    stale = step(make("streaming-llm", model), ids[:, :90], CACHE_SIZE + 1)
    zero = make("kvalign", model, aligner=tables(model), num_sinks=4)
    moved = step(zero, ids[:, :90], CACHE_SIZE + 1)
    assert torch.allclose(stale, moved, atol=1e-4)


@pytest.mark.parametrize(
    ("num_evicted", "num_sinks", "dtype"),
    one_of_each([1, 3, 16], [0, 4], [torch.float32, torch.bfloat16]),
)
def test_entries_are_moved_once_however_often_they_moved(num_evicted, num_sinks, dtype, ids):
    """After 100 tokens every entry is its birth less m[born] plus m[now], rounded twice."""
    model = tiny_model("gpt2").to(dtype)
    aligner = tables(model, scale=0.5)
    sizes = dict(num_evicted=num_evicted, num_sinks=num_sinks)
    method, births = make("kvalign", model, aligner=aligner, **sizes), []
    for layer in method.cache.layers:
        births.append(record_births(layer))
    for part in ids[:, :100].split([CACHE_SIZE + 1] + [1] * (99 - CACHE_SIZE), 1):
        method.feed(part)
    index, stored = method.cache.index(), method.cache.num_stored
    born = method.sizes.num_stored(index)[num_sinks:]
    now = torch.arange(num_sinks, stored)
    assert (born - now).max() >= CACHE_SIZE - num_sinks - num_evicted
    tolerance = dict(rtol=4 * torch.finfo(dtype).eps, atol=16 * torch.finfo(dtype).eps)
    for i, layer in enumerate(method.cache.layers):
        for target in ("key", "value"):
            means, scales = (getattr(aligner, target + x)[i] for x in ("", "_scale"))
            found = getattr(layer, target + "s")
            birth = torch.cat([getattr(pair, target) for pair in births[i]], 2)[:, :, index]
            assert torch.equal(found[:, :, :num_sinks], birth[:, :, :num_sinks])
            anchored = (birth[:, :, num_sinks:].float() - means[:, born]) / scales[:, born, None]
            moved = means[:, now] + anchored * scales[:, now, None]
            assert torch.allclose(found[:, :, num_sinks:].float(), moved, **tolerance)


class Pair(NamedTuple):
    key: torch.Tensor
    value: torch.Tensor


def record_births(layer) -> list:
    """Every key and value that a layer of the cache is given from now on."""
    given, update = [], layer.update

    def recording(keys, values, *args, **kwargs):
        given.append(Pair(keys, values))
        return update(keys, values, *args, **kwargs)

    layer.update = recording
    return given


def test_a_table_says_how_many_sinks_and_takes_any(models):
    table = tables(models["gpt2"], num_sinks=4)
    for asked, kept in ((None, 4), (2, 2), (0, 0)):
        assert (
            make("kvalign", models["gpt2"], num_sinks=asked, aligner=table).sizes.num_sinks == kept
        )


def test_untrained_anchored_network_is_its_table(model, ids):
    table = tables(model, scale=0.5)
    aligner = anchored(model, scale=0.5)
    one = step(make("kvalign", model, aligner=table), ids[:, :90], CACHE_SIZE + 1)
    method = make("kvalign", model, aligner=aligner)
    assert torch.allclose(step(method, ids[:, :90], CACHE_SIZE + 1), one, atol=1e-4)
    torch.nn.init.normal_(aligner.key.fc3.weight)
    assert not torch.allclose(step(method, ids[:, :90], CACHE_SIZE + 1), one, atol=1e-3)


def test_default_sinks_are_the_aligners(models):
    assert make("kvalign", models["gpt2"], aligner=tables(models["gpt2"])).sizes.num_sinks == 0
    assert make("kvalign", models["gpt2"]).sizes.num_sinks == 4


@pytest.mark.parametrize("make_aligner", [tables, anchored])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_long_inputs_stay_within_the_tables(kind, make_aligner, models, ids):
    """What a full cache is fed is born at positions the tables know: one by one if none is to
    spare.
    """
    aligner = make_aligner(models[kind], scale=0.2, chunk_len=CACHE_SIZE + 1)
    whole, single = (make("kvalign", models[kind], aligner=aligner) for _ in range(2))
    expected = step(single, ids[:, :90], CACHE_SIZE + 1)[-1]
    assert torch.allclose(whole.feed(ids[:, :90]), expected, atol=1e-4)
    if make_aligner is tables:  # placed on read: an input counts as its tokens one by one
        return
    roomy = make_aligner(models[kind], scale=0.2, chunk_len=CACHE_SIZE + 4)
    method, births = make("kvalign", models[kind], aligner=roomy), []
    anchor = roomy.anchor
    roomy.anchor = lambda *args: births.append(args[2]) or anchor(*args)
    assert torch.isfinite(method.feed(ids[:, :90])).all()
    ends = [b.stop if isinstance(b, slice) else int(b.max()) + 1 for b in births]
    assert max(ends) == CACHE_SIZE + 4
