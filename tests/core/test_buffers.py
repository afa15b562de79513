"""What a cache takes in memory, and that entries which never move are rounded once."""

from dataclasses import replace

import pytest
import torch
from helpers.methods import anchored, network, tables
from helpers.tiny_models import tiny_model

from kvalign.cache import StreamingCache
from kvalign.models import rotation_of, spec_of
from kvalign.realign import realigner_of
from kvalign.rope import rerotate
from kvalign.sizes import CacheSizes

MOVED = {
    "nothing": ("gpt2", lambda model: None, 2),
    "rotating": ("llama", lambda model: None, 2),
    "table": ("gpt2", lambda model: tables(model, scale=0.5), 2),
    "rotary table": ("llama", lambda model: tables(model, scale=0.5), 2),
    "anchored": ("gpt2", lambda model: anchored(model, scale=0.5), 4),
    "network": ("gpt2", network, 2),  # its last output is what attention sees
}


def random_keys(spec, num_rows, num_new, rng, dtype=torch.float32):
    shape = (num_rows, spec.num_kv_heads, num_new, spec.head_dim)
    return torch.randn(shape, generator=rng).to(dtype)


@pytest.mark.parametrize("what", MOVED)
@pytest.mark.parametrize("cache_size", [20, 55])
@pytest.mark.parametrize("first", [1, 200])
def test_buffers_are_small_and_stay(what, cache_size, first, models):
    """A quarter more than the entries; nothing is allocated once the cache is full."""
    kind, make_aligner, num_buffers = MOVED[what]
    model, rng = models[kind], torch.Generator().manual_seed(0)
    spec = spec_of(model.config)
    realigner = realigner_of(model, make_aligner(model))
    cache = StreamingCache(replace(spec, num_layers=1), CacheSizes(cache_size), realigner)
    (layer,) = cache.layers
    first = min(first, cache_size + 1) if num_buffers == 4 or "table" in what else first
    places = set()
    for i in range(1000):
        new = random_keys(spec, 2, first if i == 0 else 1, rng)
        with torch.no_grad():
            cache.update(new, new, 0)
        sizes = [
            x.data.untyped_storage().nbytes() // (new[:, :, :1].numel() * 4) for x in buffers(layer)
        ]
        assert len(sizes) == num_buffers and max(sizes) <= 1.3 * (cache_size + 1)
        if i > 2 * cache_size:
            places.add(tuple(x.data.data_ptr() for x in buffers(layer)))
    assert len(places) == 1


def buffers(layer):
    return layer.buffers


@pytest.mark.parametrize("num_rows", [1, 3])
def test_rows_that_come_and_go_leave_no_room_behind(num_rows, models):
    """Nor does a batch that is selected hold what the larger one held."""
    spec, rng = spec_of(models["llama"].config), torch.Generator().manual_seed(0)
    one, other = (
        StreamingCache(spec, CacheSizes(40), realigner_of(models["llama"])) for _ in range(2)
    )
    for cache, num_new in ((one, 30), (other, 41)):
        for i in range(spec.num_layers):
            cache.update(*2 * [random_keys(spec, num_rows, num_new, rng)], i)
    for _ in range(4):
        one.join([other])
        one.select([0, *range(num_rows, 2 * num_rows)][:num_rows])
        for _ in range(100):
            for i in range(spec.num_layers):
                one.update(*2 * [random_keys(spec, num_rows, 1, rng)], i)
    for buffer in (buffer for layer in one.layers for buffer in layer.buffers):
        assert buffer.data.shape[0] == num_rows and buffer.data.shape[2] <= 1.3 * 41
        assert buffer.data.untyped_storage().nbytes() == buffer.data.numel() * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", ["rotating", "table", "rotary table"])
def test_half_precision_does_not_drift(dtype, what):
    """After 10 000 steps the keys that attention gets are those of float32 arithmetic, rounded two
    or three times (measured: rotating in bfloat16 at each step is off by 12 %).
    """
    kind, make_aligner, _ = MOVED[what]
    model = tiny_model(kind)
    rng, cache_size, num_steps = torch.Generator().manual_seed(0), 40, 10_000
    spec, aligner = replace(spec_of(model.config), num_layers=1), make_aligner(model)
    cache = StreamingCache(spec, CacheSizes(cache_size), realigner_of(model, aligner))
    given, births, frames = [], [], []
    for i in range(num_steps):
        keys = random_keys(spec, 1, 1, rng, dtype)
        place = min(i, cache_size)
        given.append(keys)
        births.append(place)
        frames.append(cache.positions()[0] - place if i else 0)  # how far it has run on
        cache.update(keys, keys, 0)
        if i % 1111 and i + 1 < num_steps:
            continue
        index = cache.index()
        held = torch.cat([given[token] for token in index], 2).float()
        born, behind = (torch.tensor(x)[index] for x in (births, frames))
        now = torch.arange(len(index))
        expected, before = held, held
        if what == "table":
            means, scales = aligner.key[0], aligner.key_scale[0]
            before = scales[:, now, None] * (held - means[:, born]) / scales[:, born, None]
            expected = torch.where(now[:, None] < 4, held, means[:, now] + before)
        elif what == "rotary table":
            inv_freq, means, scales = (
                rotation_of(model).inv_freq,
                aligner.key[0],
                aligner.key_scale[0],
            )
            before = rerotate(held, born + behind, inv_freq) - means[:, born]
            before = scales[:, now, None] * before / scales[:, born, None]
            expected = torch.where(
                now[:, None] < 4, rerotate(held, now, inv_freq), means[:, now] + before
            )
            expected = rerotate(expected, -(now + cache.frame.num_behind(i + 1)), inv_freq)
        else:
            inv_freq = rotation_of(model).inv_freq
            now = now + cache.frame.num_behind(i + 1)
            expected = rerotate(held, born + behind - now, inv_freq)
        error = (cache.layers[0].keys.float() - expected).norm(dim=-1)
        size = before.norm(dim=-1) + expected.norm(dim=-1)
        assert (error <= 1.5 * torch.finfo(dtype).eps / 2 * size).all()
