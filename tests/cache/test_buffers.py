"""What a cache takes in memory, and that entries which never move are rounded once."""

from dataclasses import replace

import pytest
import torch
from helpers.methods import network, tables
from helpers.tiny_models import tiny_model

from kvalign.cache.realigner import realigner_of
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.models.architectures import spec_of

# What keeps entries right: kind of model, aligner, cache size, buffers of a layer.
MOVED = {
    "nothing": ("gpt2", None, 20, 2),
    "rotating": ("llama", None, 40, 2),
    "returning": ("dynamic", None, 55, 4),
    "table": ("gpt2", tables, 40, 2),
    "rotary table": ("llama", tables, 40, 2),
    "moved table": ("dynamic", tables, 55, 4),
    "moved learned table": ("gpt_neo", tables, 20, 4),
    "network": ("gpt2", network, 20, 2),  # its last output is what attention sees
}


def make_cache(what):
    """A cache of one layer, the aligner, and what the model is."""
    kind, make_aligner, cache_size, _ = MOVED[what]
    dynamic = dict(rope_parameters=dict(rope_type="dynamic", factor=2.0))
    model = tiny_model("llama", **dynamic) if kind == "dynamic" else tiny_model(kind)
    aligner = make_aligner(model, 0.5) if make_aligner else None
    spec = replace(spec_of(model.config), num_layers=1)
    return StreamingCache(spec, CacheSizes(cache_size), realigner_of(model, aligner)), aligner, spec


def random_keys(spec, num_rows, num_new, rng, dtype=torch.float32):
    shape = (num_rows, spec.num_kv_heads, num_new, spec.head_dim)
    return torch.randn(shape, generator=rng).to(dtype)


@pytest.mark.parametrize("what", MOVED)
@torch.no_grad()
def test_buffers_are_small_and_stay(what):
    """A slot for each entry; nothing is allocated once the cache is full."""
    cache, _, spec = make_cache(what)
    (layer,), most = cache.layers, cache.sizes.first_input_len
    rng, places = torch.Generator().manual_seed(0), set()
    for i in range(1000):
        new = random_keys(spec, 2, most if i == 0 and spec.family == "learned" else 1, rng)
        cache.update(new, new, 0)
        held = [x.untyped_storage() for ring in layer.rings for x in ring.data]
        assert len(held) == MOVED[what][3]
        assert max(x.nbytes() for x in held) <= most * new[:, :, :1].nbytes
        if i > 2 * most:
            places.add(tuple(x.data_ptr() for x in held))
    assert len(places) == 1


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
    for x in (x for layer in one.layers for ring in layer.rings for x in ring.data):
        assert x.shape[0] == num_rows and x.shape[2] == 41
        assert x.untyped_storage().nbytes() == x.numel() * 4
