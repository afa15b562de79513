"""Entries and sizes of the streaming cache. The peers' bugs behind a test are named with it."""

import pytest
import torch
from helpers.tiny_models import VOCAB, tiny_model
from transformers import DynamicCache

from kvalign.cache.sizes import CacheSizes
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.methods import make_method
from kvalign.models.architectures import spec_of


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(cache_size=64), "cache_size must be at most 63"),
        (dict(cache_size=4), "cache_size must be above num_sinks"),
        (dict(cache_size=16, num_evicted=13), "num_evicted must be between 1 and the window"),
        (dict(cache_size=16, realign_every=0), "realign_every must be at least 1, got 0"),
        (
            dict(cache_size=60, realign_every=5),
            "realign_every must be at most 4 for tiny with cache_size 60 .* got 5",
        ),
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
