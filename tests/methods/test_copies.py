"""Streams that are copied, pickled, or whose model is turned to another precision on the way: they
go on, or are refused in one line that says what to do. Those that are let go leave nothing.
"""

import copy
import pickle

import pytest
import torch
from helpers.live_tensors import live_bytes, no_collections
from helpers.methods import WAYS, made
from helpers.refusals import refuses
from helpers.tiny_models import tiny_model

import kvalign
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.foundation.errors import UserError

CASES = [
    *WAYS,
    ("streaming-llm", "llama", dict(memory=30)),
    ("tables", "gpt2", dict(memory=30)),
    ("streaming-llm", "llama", dict(policy="h2o")),
]


@pytest.mark.parametrize(("name", "kind", "sizes"), CASES)
def test_a_copy_goes_on_alone(name, kind, sizes, models, ids):
    """On the same model; what is fed to one is not seen by the other."""
    method = made(name, models[kind], **sizes)
    assert copy.deepcopy(method).fill == 0
    method.feed(ids[:, :30])
    other, caches = copy.deepcopy(method), []
    assert other.model is method.model
    if (
        isinstance(getattr(method, "cache", None), kvalign.StreamingCache)
        and name != "discard-half"
    ):
        caches = [copy.deepcopy(method.cache)]
        assert caches[0].realigner is method.cache.realigner
    expected = [method.feed(ids[:, i : i + 1]) for i in range(30, 50)]
    assert all(torch.equal(other.feed(ids[:, 30 + i, None]), x) for i, x in enumerate(expected))
    for cache in caches:
        method.cache = cache
        again = [method.feed(ids[:, i : i + 1]) for i in range(30, 50)]
        assert all(map(torch.equal, again, expected))
    for one in [method, *([method.cache] if caches else [])]:
        refuses(lambda one=one: pickle.dumps(one), "restore() restores them")


@pytest.mark.parametrize(("name", "kind", "sizes"), CASES)
def test_what_is_let_go_is_gone_at_once(name, kind, sizes, models, ids):
    """Without the garbage collector, which may come hundreds of streams later."""

    def stream(num):
        method = made(name, models[kind], **sizes)
        for part in ids[:, :num].split(30, 1) if num else ():
            method.feed(part)
        return method

    with no_collections():
        stream(31)  # what is made once and for all
        before = live_bytes()
        method = stream(31)
        copied = copy.deepcopy(method)
        del method, copied
        assert live_bytes() == before
        method = stream(0)
        empty = live_bytes()
        method = stream(31)
        fed = live_bytes()
        if isinstance(cache := getattr(method, "cache", None), StreamingCache):
            cache.reset()
            assert live_bytes() - empty < (fed - empty) / 2  # tables at all places stay


def test_a_text_is_saved(loaded):
    stream = kvalign.stream(loaded.model, loaded.tokenizer, "The history", cache_size=12)
    next(iter(stream))
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        refuses(lambda way=way: way(stream), "save() it")
    assert next(iter(stream))


@pytest.mark.parametrize(("name", "kind", "sizes"), CASES)
def test_a_model_is_turned_to_another_precision(name, kind, sizes, ids):
    """What is re-encoded goes on; the others say what to do, and go on once it is done."""
    model = tiny_model(kind)
    method = made(name, model, **sizes)
    expected = made(name, model, **sizes)
    for one in (method, expected):
        one.feed(ids[:, :30])
    state = {key: x.clone() for key, x in method.state().items()}
    model.to(torch.bfloat16)
    if name == "recompute":
        assert method.feed(ids[:, 30:31]).isfinite().all()
        return
    said = r"^.*float32.* now .*bfloat16.*: reset\(\) the stream.*$"
    with pytest.raises(UserError, match=said):
        method.feed(ids[:, 30:31])
    anew = made(name, model, **sizes)
    method.reset()
    assert torch.equal(method.feed(ids[:, :4]), anew.feed(ids[:, :4]))
    model.to(torch.float32)
    method.reset()
    method.restore(state)
    assert method.feed(ids[:, 30:31]).isfinite().all()
