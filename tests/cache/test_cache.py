"""Entries and sizes of the streaming cache. The peers' bugs behind a test are named with it."""

import random

import pytest
import torch
from helpers.methods import CACHE_SIZE, tables
from helpers.tiny_models import CONTEXT_LEN, VOCAB, tiny_model
from transformers import DynamicCache

from kvalign.cache.sizes import CacheSizes
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.foundation.errors import UserError
from kvalign.methods import make_cache, make_method
from kvalign.methods.cached import KVAlign
from kvalign.models.architectures import spec_of


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(cache_size=64), "cache_size must be at most 63"),
        (dict(cache_size=4), "cache_size must be above num_sinks"),
        (dict(cache_size=16, num_evicted=13), "num_evicted must be between 1 and the window"),
        (dict(cache_size=16, realign_every=0), "realign_every must be at least 1, got 0"),
    ],
)
def test_impossible_sizes_are_refused(models, sizes, message):
    """Sinks that fill the cache looped for ever in llama.cpp (issue 3969)."""
    with pytest.raises(ValueError, match=message) as caught:
        StreamingCache(spec_of(models["gpt2"].config, "tiny"), CacheSizes(**sizes))
    assert "\n" not in str(caught.value)


def test_rows_that_do_not_fit_are_refused(models, ids):
    spec = spec_of(models["gpt2"].config)
    cache, other = (StreamingCache(spec, CacheSizes(12)) for _ in range(2))
    _stream(models["gpt2"], cache, ids, 3)
    with pytest.raises(ValueError, match="this cache has 2 rows, got ids of 1"):
        models["gpt2"](input_ids=ids[:1, :1], past_key_values=cache)
    _stream(models["gpt2"], other, ids[:1], 5)
    cache.join([other])
    assert cache.seen == [3, 3, 5]
    with pytest.raises(ValueError, match="rows of unequal length take one token each, got 2"):
        models["gpt2"](input_ids=ids[[0, 1, 0], :2], past_key_values=cache)


def _stream(model, cache, ids, num_tokens):
    cache.reset()
    for i in range(num_tokens):
        logits = model(input_ids=ids[:, i : i + 1], past_key_values=cache).logits
    return logits


@pytest.mark.parametrize("kind", ["gpt_neo", "mistral", "bloom"])
@torch.no_grad()
def test_attention_that_goes_by_order_gets_entries_in_order(kind):
    """Local layers and ALiBi count keys; their window is smaller than the cache here."""
    changes = {"gpt_neo": dict(window_size=8), "mistral": dict(sliding_window=8), "bloom": {}}
    model = tiny_model(kind, **changes[kind])
    method = make_method("streaming-llm", model, cache_size=12, num_sinks=2, warn=False)
    ids = torch.randint(2, VOCAB, (1, 60), generator=torch.Generator().manual_seed(0))
    method.feed(ids[:, :5])
    for i in range(5, 60):
        cache, plain = method.cache, DynamicCache(config=model.config)
        at = torch.tensor([[cache.get_seq_length()]])
        for layer in cache.attention:
            plain.update(layer.keys.clone(), layer.values.clone(), layer.layer_idx)
        told = {} if kind == "bloom" else {"position_ids": at}
        token = ids[:, i : i + 1]
        expected = model(input_ids=token, past_key_values=plain, use_cache=True, **told).logits
        assert torch.allclose(method.feed(token), expected[:, -1], atol=1e-4), i


@pytest.mark.parametrize(
    ("num_evicted", "most", "last_position"), [(1, 44, 63), (2, 44, 62), (3, 45, 62), (16, 48, 52)]
)
def test_positions_run_on_and_no_more_than_there_are(num_evicted, most, last_position, models, ids):
    """Of a model of 64, whole evictions run on from a cache of 20."""
    model, aligner = models["gpt2"], tables(models["gpt2"], scale=0.5)
    sizes = CacheSizes(CACHE_SIZE, 4, num_evicted, most)
    method, highest = KVAlign(model, sizes, aligner=aligner), 0
    for i in range(ids.shape[1]):
        highest = max(highest, method.cache.get_seq_length())
        assert torch.isfinite(method.feed(ids[:, i : i + 1])).all()
    assert highest == sizes.last_position == last_position < CONTEXT_LEN
    moved = models["gpt_neo"]
    chunks = KVAlign(moved, sizes, aligner=tables(moved, scale=0.5))
    assert not chunks.is_exact and torch.isfinite(chunks.feed(ids)).all()
    with pytest.raises(UserError, match=f"realign_every must be at most {most} for ") as caught:
        KVAlign(model, CacheSizes(CACHE_SIZE, 4, num_evicted, most + 1), aligner=aligner)
    assert "\n" not in str(caught.value)


def test_realign_every_is_refused_where_it_has_no_effect(models):
    model, aligner = models["llama"], tables(models["llama"])
    with pytest.raises(UserError, match="realign_every must be 1"):
        KVAlign(model, CacheSizes(CACHE_SIZE, 4, 1, 3), aligner=aligner)
    KVAlign(model, CacheSizes(CACHE_SIZE, 4, 1, 1), aligner=aligner)


def test_plain_generate_is_refused_at_its_first_call(model, ids):
    """Its position ids grow with the stream: learned ones run out, rotary ones are others."""
    cache = make_cache(model, method="streaming-llm", cache_size=20)
    with pytest.raises(UserError, match="custom_generate=kvalign.stream_generate"):
        model.generate(ids[:1, :15], past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert not cache.seen


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bloom"])
@pytest.mark.parametrize(
    "sizes",
    [{}, dict(num_evicted=6), dict(policy="key-norm"), dict(policy="key-norm", num_evicted=6)],
)
@torch.no_grad()
def test_tokens_of_one_call_are_as_single_ones_or_refused(kind, sizes, models, ids):
    """More than fit would see entries that are evicted between them."""
    model, several, single = (
        models[kind],
        *(
            make_cache(models[kind], method="streaming-llm", cache_size=20, **sizes)
            for _ in range(2)
        ),
    )
    rng, at = random.Random(0), 0
    while at < 70:
        with pytest.raises(UserError, match=f"got {several.room + 1}"):
            model(ids[:, at : at + several.room + 1], past_key_values=several)
        num = rng.randint(1, several.room)
        found = model(ids[:, at : at + num], past_key_values=several).logits
        expected = [
            model(ids[:, i : i + 1], past_key_values=single).logits for i in range(at, at + num)
        ]
        assert torch.allclose(found, torch.cat(expected, 1), atol=1e-4)
        at += num
