"""The relative form is stepping: every family, any sizes, any cut into segments."""

import pytest
import torch
from helpers.methods import CACHE_SIZE, make, tables
from helpers.tiny_models import KINDS, tiny_model

from kvalign import relative, scoring
from kvalign.scoring import score, score_stepwise
from kvalign.sizes import CacheSizes

EXACT = ("gpt2", "opt", "llama", "mistral", "qwen2", "qwen3", "gpt_neox", "bloom")


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("name", ["window", "streaming-llm", "kvalign"])
@pytest.mark.parametrize("num_evicted", [1, 3, 16])
def test_segments_are_stepping(models, kind, name, num_evicted, ids, monkeypatch):
    model = models[kind]
    extra = {"aligner": tables(model, scale=0.5)} if name == "kvalign" else {}
    method = make(name, model, num_evicted=num_evicted, **extra)
    expected = score_stepwise(method, ids[:1, :120])
    assert relative.is_exact(model, CACHE_SIZE, method.cache.realigner) != (
        (kind, name) == ("bloom", "kvalign")
    )
    for segment_len in (7, 50, 256):
        monkeypatch.setattr(scoring, "SEGMENT_LEN", segment_len)
        found = score(method, ids[:1, :120])
        assert torch.allclose(found, expected, atol=2e-4)
        assert abs(found.mean().exp() / expected.mean().exp() - 1) < 1e-4


def test_nothing_else_is_taken(models):
    """Other models step: attention of their own, sliding windows inside the cache, networks."""
    for kind in set(KINDS) - set(EXACT):
        assert not relative.is_exact(models[kind], CACHE_SIZE, None)
    sliding = tiny_model("mistral", sliding_window=8)
    assert not relative.is_exact(sliding, CACHE_SIZE, make("window", sliding).cache.realigner)
    network = make("kvalign", models["gpt2"])
    assert not relative.is_exact(models["gpt2"], CACHE_SIZE, network.cache.realigner)


def test_memory_does_not_grow_with_the_text(models, ids):
    model = models["gpt2"]
    stream = relative.Stream(model, CacheSizes(CACHE_SIZE, 4, 3), None)
    stored = set()
    for start in range(0, 200, 10):
        stream.feed(ids[:, start : start + 10])
        stored.add(stream.cache.get_seq_length())
    assert max(stored) <= CACHE_SIZE


def test_the_model_is_left_as_it_was(models, ids):
    model = models["gpt2"]
    before = model.config._attn_implementation, model(input_ids=ids[:, :30]).logits
    stream = relative.Stream(model, CacheSizes(CACHE_SIZE), None)
    with pytest.raises(RuntimeError):
        stream.feed(ids.float())
    assert model.config._attn_implementation == before[0]
    assert torch.equal(model(input_ids=ids[:, :30]).logits, before[1])
