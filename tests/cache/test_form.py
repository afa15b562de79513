"""Entries of 8 bits: what they stand for, and streams whose caches store them."""

import pytest
import torch
from helpers.methods import anchored, network, tables
from helpers.tiny_models import tiny_model

import kvalign
from kvalign.cache.buffer import KV
from kvalign.cache.form import Form
from kvalign.foundation.errors import UserError
from kvalign.methods import make_cache, make_method

INT8 = Form(torch.float32, is_int8=True)
NUM, VOCAB = 120, 400
SIZES = dict(cache_size=16, num_sinks=2)
MEMORY = dict(memory=60, num_recalled=6)
ALL = dict(memory=8, num_recalled=8)  # so that there is nothing to choose
WAYS = {"llama": "rotation", "gpt2": "table", "bloom": "rotation"}


@pytest.fixture(scope="module")
def models():
    return {kind: tiny_model(kind, vocab_size=VOCAB) for kind in WAYS}


@pytest.fixture(scope="module")
def ids():
    rng = torch.Generator().manual_seed(5)
    return torch.stack([torch.randperm(VOCAB - 2, generator=rng)[:NUM] + 2 for _ in range(2)])


def new(model, cache_dtype="int8", **changes):
    sizes = SIZES | {"cache_dtype": cache_dtype} | changes
    if model.config.model_type != "gpt2":
        return make_method("streaming-llm", model, **sizes)
    return make_method("kvalign", model, aligner=tables(model, scale=0.3), **sizes)


def stepped(method, ids):
    return torch.stack([method.feed(ids[:, i : i + 1]) for i in range(ids.shape[1])], 1)


def apart(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("dim", [64, 6])
def test_each_number_is_half_a_step_off_at_most(dim):
    x = torch.randn(2, 3, 40, dim) * torch.logspace(-8, 8, 40)[:, None]
    x[0, 0, 0] = 0
    stored = INT8.stored(x)
    assert stored.shape == (2, 3, 40, dim + 4) and stored.dtype == torch.int8
    step = x.abs().amax(-1, keepdim=True) / 127
    assert ((INT8.read(stored) - x).abs() <= 0.5001 * step).all()
    assert torch.equal(INT8.read(stored[:, :, 5:9]), INT8.read(stored)[:, :, 5:9])
    again = INT8.stored(INT8.read(stored))
    assert torch.equal(again[..., :dim], stored[..., :dim])


@pytest.mark.parametrize("other", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(other):
    x = torch.ones(1, 1, 2, 16)
    x[0, 0, 0, 3] = other
    found = INT8.read(INT8.stored(x))
    assert not found[0, 0, 0, 3].isfinite() and torch.equal(found[0, 0, 1], x[0, 0, 1])


@pytest.mark.parametrize(
    ("kind", "memory"), [*((kind, {}) for kind in WAYS), ("llama", ALL), ("gpt2", ALL)]
)
def test_a_stream_is_near_that_of_floats_however_it_is_fed(kind, memory, models, ids):
    expected = stepped(new(models[kind], "model", **memory), ids)
    found = stepped(new(models[kind], **memory), ids)
    assert 0 < apart(found, expected) < 0.03
    for cuts in ([1, 80, NUM], [10, 11, NUM]):
        method, start = new(models[kind], **memory), 0
        for end in cuts:
            assert apart(method.feed(ids[:, start:end]), found[:, end - 1]) < 0.03
            start = end


def test_the_bytes_of_an_entry(models, ids):
    """D + 4 for a key, and for a value, in the window, the sinks and the memory."""
    method, plain = (new(models["llama"], dtype, **MEMORY) for dtype in ("int8", "model"))
    for one in (method, plain):
        one.feed(ids)
    dim = models["llama"].config.head_dim
    state, floats = method.state(), plain.state()
    of_floats = {"bare": "entries", "bare_sinks": "sinks", "memory": "memory"}
    for name in [name for name in state if name != "seen" and not name.endswith(".base")]:
        layer, kind, j = name.split(".")
        expected = floats[f"{layer}.{of_floats[kind]}.{j}"]
        assert state[name].dtype == torch.int8 and state[name].shape[-1] == dim + 4
        assert state[name].shape[:3] == expected.shape[:3]
        if kind == "memory" or j == "1":  # the other keys are without their position
            assert apart(INT8.read(state[name]), expected) < 0.2


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_saved_stream_goes_on_to_the_last_digit(kind, models, ids):
    method = new(models[kind], **MEMORY)
    stepped(method, ids[:, :90])
    after = new(models[kind], **MEMORY)
    after.restore(method.state())
    assert torch.equal(stepped(after, ids[:, 90:]), stepped(method, ids[:, 90:]))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_rows_are_what_they_are_alone(kind, models, ids):
    lens, model = (5, 30, 70), models[kind]
    alone = [new(model, **MEMORY) for _ in lens]
    together, *others = (new(model, **MEMORY) for _ in lens)
    for one, method, n in zip(alone, (together, *others), lens, strict=True):
        for x in (one, method):
            x.feed(ids[:1, :n])
    together.join(others)
    together.select([2, 0, 1])
    for i in range(30):
        tokens = [ids[:1, n + i : n + i + 1] for n in lens]
        expected = torch.cat([one.feed(x) for one, x in zip(alone, tokens, strict=True)])
        found = together.feed(torch.cat(tokens)[[2, 0, 1]])
        assert apart(found, expected[[2, 0, 1]]) < 0.05


def test_what_is_written_again_at_each_move_is_refused(models):
    llama = models["llama"]
    for make in (network, anchored):
        with pytest.raises(UserError, match="int8 does not work here: .* when they move"):
            make_method("kvalign", llama, aligner=make(llama), **SIZES, cache_dtype="int8")
    with pytest.raises(UserError, match="cache_dtype int8 needs policy oldest"):
        make_cache(llama, **SIZES, cache_dtype="int8", policy="key-norm", method="streaming-llm")
    with pytest.raises(UserError, match="cache_dtype must be model or int8, got 'int4'"):
        make_cache(llama, **SIZES, cache_dtype="int4", method="streaming-llm")


def test_a_file_says_that_its_entries_have_8_bits(tmp_path):
    loaded, path = kvalign.load_model("gpt2-mini"), tmp_path / "talk.safetensors"
    asked = dict(cache_size=16, cache_dtype="int8", seed=1, max_new_tokens=60)
    stream = kvalign.stream(loaded.model, loaded.tokenizer, "The island", **asked)
    for _, _piece in zip(range(30), stream, strict=False):
        pass
    stream.save(path)
    again = kvalign.load_stream(path, loaded.model, loaded.tokenizer)
    assert again.method.sizes.cache_dtype == "int8"
    assert "cache of 16 entries in int8" in again.method.in_words
    assert list(again) == list(stream)


def test_scales_that_are_no_numbers_are_refused(models, ids):
    method = new(models["llama"])
    method.feed(ids)
    state = method.state()
    wrong = KV(*(state[f"1.bare.{j}"].clone() for j in range(2)))
    wrong.values.view(torch.float32)[0, 0, 3, -1] = torch.nan
    with pytest.raises(UserError, match=r"a stream's 1.bare.1 has scales that are not finite"):
        new(models["llama"]).restore(state | {"1.bare.1": wrong.values})
