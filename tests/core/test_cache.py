"""Slots, sizes and half precision of the streaming cache. The peers' bugs behind a test are named
with it.
"""

import pytest
import torch
from helpers.tiny_models import ROTARY_KINDS, tiny_model

from kvalign.cache import Slots, StreamingCache
from kvalign.models import rotation_of, spec_of
from kvalign.realign import FromBirth
from kvalign.rope import rerotate
from kvalign.sizes import CacheSizes


def test_slots_keep_sinks_and_the_newest():
    slots = Slots(CacheSizes(cache_size=7, num_sinks=3, num_evicted=1))
    for _ in range(10):
        slots.append(1)
    assert slots.index.tolist() == [0, 1, 2, 6, 7, 8, 9]
    assert slots.birth.tolist() == [0, 1, 2, 6, 7, 7, 7]


def test_evictions_are_counted_one_in_k():
    """A full cache that evicts 3 at once evicts every third token (ik_llama.cpp pull 2459: every
    token).
    """
    slots = Slots(CacheSizes(cache_size=10, num_sinks=2, num_evicted=3))
    lengths = []
    for _ in range(40):
        slots.append(1)
        lengths.append(len(slots))
    assert slots.num_evictions == 10
    assert max(lengths) == 10 and min(lengths[10:]) == 8


@pytest.mark.parametrize("chunks", [[25], [10, 15], [1] * 25, [11, 1, 1, 6, 6]])
@pytest.mark.parametrize("num_evicted", [1, 2, 5, 8])
def test_slots_do_not_depend_on_chunks(chunks, num_evicted):
    """Two moves are one long move (llama.cpp issue 3825: only the last was kept)."""
    slots = Slots(CacheSizes(cache_size=11, num_sinks=3, num_evicted=num_evicted))
    for chunk in chunks:
        slots.append(chunk)
    dropped = -(-(25 - 11) // num_evicted) * num_evicted
    assert slots.index.tolist() == [0, 1, 2, *range(3 + dropped, 25)]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(cache_size=64), "cache_size must be at most 63"),
        (dict(cache_size=4), "cache_size must be above num_sinks"),
        (dict(cache_size=16, num_sinks=-1), "num_sinks must be at least 0"),
        (dict(cache_size=16, num_evicted=13), "num_evicted must be between 1 and the window"),
        (dict(cache_size=16, num_evicted=0), "num_evicted must be between 1 and the window"),
    ],
)
def test_impossible_sizes_are_refused(models, sizes, message):
    """Sinks that fill the cache looped for ever in llama.cpp (issue 3969)."""
    with pytest.raises(ValueError, match=message):
        StreamingCache(spec_of(models["gpt2"].config, "tiny"), CacheSizes(**sizes))


def test_mask_length_is_key_length(models, ids):
    """What the model is told of the cache's length is what attention gets (VeloxQuant-MLX issue
    370).
    """
    cache = StreamingCache(spec_of(models["gpt2"].config), CacheSizes(16))
    for i in range(40):
        told = cache.get_mask_sizes(1, 0)[0]
        models["gpt2"](input_ids=ids[:, i : i + 1], past_key_values=cache)
        assert told == min(i, 16) + 1
        assert {len(layer.keys[0, 0]) for layer in cache.layers} == {min(i + 1, 16)}


def test_batch_rows_are_independent(model, ids):
    """Rows of a batch do not mix (llama.cpp issue 6002)."""
    both, one = (StreamingCache(spec_of(model.config), CacheSizes(12)) for _ in range(2))
    for i in range(30):
        wide = model(input_ids=ids[:, i : i + 1], past_key_values=both).logits[1]
        narrow = model(input_ids=ids[1:, i : i + 1], past_key_values=one).logits[0]
    assert torch.allclose(wide, narrow, atol=1e-4)


def test_rows_can_be_selected(models, ids):
    model = models["llama"]
    cache = StreamingCache(spec_of(model.config), CacheSizes(12), realigner=FromBirth(model))
    for i in range(20):
        model(input_ids=ids[:, i : i + 1], past_key_values=cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = model(input_ids=ids[:, 20:21].flip(0), past_key_values=cache).logits
    again = StreamingCache(spec_of(model.config), CacheSizes(12), realigner=FromBirth(model))
    for i in range(21):
        straight = model(input_ids=ids[:, i : i + 1], past_key_values=again).logits
    assert torch.allclose(swapped.flip(0), straight, atol=1e-5)


def test_cropping_is_refused(models):
    with pytest.raises(ValueError, match="cannot be cropped"):
        StreamingCache(spec_of(models["gpt2"].config), CacheSizes(12)).crop(-1)


def test_reset_begins_a_new_stream(models, ids):
    spec = spec_of(models["llama"].config)
    cache = StreamingCache(spec, CacheSizes(12), FromBirth(models["llama"]))
    first, second = (_stream(models["llama"], cache, ids, 30) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", ROTARY_KINDS)
@pytest.mark.parametrize("num_evicted", [1, 3])
def test_rotated_keys_are_the_keys_of_their_new_position(models, ids, kind, num_evicted):
    """Layer 0 of a rotary model depends on token and position alone: the cache must hold what
    re-encoding gives.
    """
    model = models[kind]
    sizes = CacheSizes(14, num_evicted=num_evicted)
    cache = StreamingCache(spec_of(model.config), sizes, FromBirth(model))
    _stream(model, cache, ids, 50)
    kept = ids[:, :50][:, cache.slots.index]
    clean = model(input_ids=kept, use_cache=True).past_key_values.layers[0]
    assert torch.allclose(cache.layers[0].keys, clean.keys, atol=2e-5)
    assert torch.allclose(cache.layers[0].values, clean.values, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_does_not_drift(dtype, ids):
    """A key that moved 40 times was rounded once (measured: repeated rotation in bfloat16 is off by
    12 %).
    """
    model = tiny_model("llama").to(dtype)
    cache = StreamingCache(spec_of(model.config), CacheSizes(48), realigner=FromBirth(model))
    _stream(model, cache, ids, 180)
    layer, first = cache.layers[1], cache.slots.sizes.num_sinks
    now = torch.arange(first, 48)
    assert (cache.slots.birth[first:] - now).max() == 44
    exact = rerotate(layer.sources[0].entries.float(), -now, rotation_of(model).inv_freq)
    error = (layer.keys[:, :, first:].float() - exact).norm() / exact.norm()
    assert error < torch.finfo(dtype).eps / 2


def _stream(model, cache, ids, num_tokens):
    cache.reset()
    for i in range(num_tokens):
        logits = model(input_ids=ids[:, i : i + 1], past_key_values=cache).logits
    return logits
