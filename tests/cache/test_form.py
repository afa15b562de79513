"""Entries of 8 bits: what they stand for, and streams whose caches store them."""

from pathlib import Path

import pytest
import torch
from helpers.methods import network, tables
from helpers.tiny_models import tiny_model
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import kvalign
from kvalign.cache.int8 import Int8, key_bases
from kvalign.foundation.errors import UserError
from kvalign.methods import make_cache, make_method
from kvalign.streaming.scoring import score

INT8 = Int8(torch.float32)
NUM, VOCAB = 80, 400
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
    stored = INT8.encode(x)
    assert stored.shape == (2, 3, 40, dim + 4) and stored.dtype == torch.int8
    step = x.abs().amax(-1, keepdim=True) / 127
    assert ((INT8.decode(stored) - x).abs() <= 0.5001 * step).all()
    assert torch.equal(INT8.decode(stored[:, :, 5:9]), INT8.decode(stored)[:, :, 5:9])
    again = INT8.encode(INT8.decode(stored))
    assert torch.equal(again[..., :dim], stored[..., :dim])


@pytest.mark.parametrize("other", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(other):
    x = torch.ones(1, 1, 2, 16)
    x[0, 0, 0, 3] = other
    found = INT8.decode(INT8.encode(x))
    assert not found[0, 0, 0, 3].isfinite() and torch.equal(found[0, 0, 1], x[0, 0, 1])


@pytest.mark.parametrize(
    ("kind", "memory"), [*((kind, {}) for kind in WAYS), ("llama", ALL), ("gpt2", ALL)]
)
def test_a_stream_is_near_that_of_floats_however_it_is_fed(kind, memory, models, ids):
    expected = stepped(new(models[kind], "model", **memory), ids)
    found = stepped(new(models[kind], **memory), ids)
    assert 0 < apart(found, expected) < 0.03
    for cuts in ([1, 50, NUM], [10, 11, NUM]):
        method, start = new(models[kind], **memory), 0
        for end in cuts:
            assert apart(method.feed(ids[:, start:end]), found[:, end - 1]) < 0.03
            start = end


@pytest.mark.parametrize("dim", [6, 18, 32, 40, 48, 64, 80, 96, 112, 120, 128, 192, 256])
def test_heads_of_every_size_are_taken(dim):
    """With a memory that has nothing to choose, an edit, and rows that are saved."""
    shape = dict(hidden_size=16, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
    model, ids = tiny_model("llama", head_dim=dim, **shape), torch.arange(2, 82).view(2, 40)
    found = []
    for cache_dtype in ("model", "int8"):
        method = new(model, cache_dtype, **ALL)
        method.feed(ids[:, :1])
        method.feed(ids[:, 1:30])
        method.edit(27, 29, ids[:, :1])
        other = method.new()
        other.restore(method.state())
        found.append(stepped(other, ids[:, 30:]))
    assert 0 < apart(*found) < 0.03


MLA = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=24, v_head_dim=16)
TWO_SIZES = {
    "deepseek_v3": MLA | dict(first_k_dense_replace=2, n_group=1, topk_group=1),
    "mimo_v2_flash": dict(head_dim=32, v_head_dim=16, layer_types=["full_attention"] * 2)
    | dict(mlp_layer_types=["dense"] * 2, sliding_window=64),
}


@pytest.mark.parametrize("kind", [kind for kind in TWO_SIZES if kind in CONFIG_MAPPING])
def test_keys_and_values_may_be_of_two_sizes(kind):
    """Their streams are saved and go on. What is kept by MLA is not moved, in 8 bits neither."""
    shape = dict(max_position_embeddings=64, hidden_size=32, num_hidden_layers=2, pad_token_id=1)
    shape |= dict(num_attention_heads=2, num_key_value_heads=2, intermediate_size=32)
    shape |= dict(vocab_size=VOCAB, n_routed_experts=4, moe_intermediate_size=8)
    config = AutoConfig.for_model(kind, **shape | TWO_SIZES[kind])
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    ids, sizes = torch.arange(2, 42).view(2, 20), dict(cache_size=12, cache_dtype="int8")
    ways = [("dense", {}), ("discard-half", dict(cache_size=12))]
    if kind == "mimo_v2_flash":
        ways.append(("streaming-llm", sizes))
    else:
        with pytest.raises(UserError, match="cannot be moved: a value .* use method discard-half"):
            make_method("streaming-llm", model, **sizes)
    for name, sizes in ways:
        method = make_method(name, model, **sizes)
        method.feed(ids[:, :12])
        other = method.new()
        other.restore(method.state())
        assert torch.equal(stepped(method, ids[:, 12:]), stepped(other, ids[:, 12:]))


def test_the_bytes_of_an_entry(models, ids):
    """D + 4 for a key, and for a value, in the window, the sinks and the memory."""
    method, plain = (new(models["llama"], dtype, **MEMORY) for dtype in ("int8", "model"))
    for one in (method, plain):
        one.feed(ids)
    dim = models["llama"].config.head_dim
    state, floats = method.state(), plain.state()
    of_floats = {"bare": "entries", "bare_sinks": "sinks", "memory": "memory"}
    for name in [name for name in state if name.rpartition(".")[2] in ("0", "1")]:
        layer, kind, j = name.split(".")
        expected = floats[f"{layer}.{of_floats[kind]}.{j}"]
        assert state[name].dtype == torch.int8 and state[name].shape[-1] == dim + 4
        assert state[name].shape[:3] == expected.shape[:3]
        if kind == "memory" or j == "1":  # the other keys are without their position
            assert apart(INT8.decode(state[name]), expected) < 0.2


def test_what_is_written_again_at_each_move_is_refused(models):
    llama = models["llama"]
    with pytest.raises(UserError, match="int8 does not work here: .* when they move"):
        make_method("kvalign", llama, aligner=network(llama), **SIZES, cache_dtype="int8")
    with pytest.raises(UserError, match="cache_dtype int8 needs policy oldest"):
        make_cache(llama, **SIZES, cache_dtype="int8", policy="key-norm", method="streaming-llm")
    with pytest.raises(UserError, match="cache_dtype must be one of model, int8, got 'int4'"):
        make_cache(llama, **SIZES, cache_dtype="int4", method="streaming-llm")


def as_qwen2(model, bias):
    """The same model with key biases of a norm in the slowest pairs of its first and last layer."""
    sizes = {x: y for x, y in model.config.to_dict().items() if x != "model_type"}
    made = Qwen2ForCausalLM(Qwen2Config(**sizes))
    made.load_state_dict(model.state_dict(), strict=False)
    for i, layer in enumerate(made.model.layers):
        of_layer, num = layer.self_attn, len(made.model.layers)
        for x in (of_layer.q_proj, of_layer.k_proj, of_layer.v_proj):
            x.bias.data.zero_()
        if i in (0, num - 1):
            pairs = of_layer.k_proj.bias.data.view(-1, 2, of_layer.head_dim // 2)
            pairs[..., -1] = bias / 2**0.5
    return made.eval()


@pytest.mark.slow
def test_a_large_key_bias_costs_no_more_than_8_bits_do():
    loaded = kvalign.load_model("llama-mini")
    text = Path(__file__, "../../../README.md").resolve().read_text()
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids[:, :500]
    for bias in (0, 849):
        model, sizes = as_qwen2(loaded.model, bias), dict(cache_size=64, num_sinks=4)
        found, expected = (
            score(make_method("streaming-llm", model, **sizes, cache_dtype=x), ids).mean()
            for x in ("int8", "model")
        )
        assert found - expected < 0.002
        bases = key_bases(model)
        assert sorted(bases) == ([0, len(model.model.layers) - 1] if bias else [])
        for i, base in bases.items():
            assert torch.equal(base.flatten(), model.model.layers[i].self_attn.k_proj.bias.data)
