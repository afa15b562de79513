"""Specs of every family, RoPE scalings that shift exactly, and refusals."""

import pytest
import torch
from helpers.tiny_models import CONTEXT_LEN, KINDS, MORE_KINDS, ROTARY_KINDS, SCALINGS, tiny_model
from transformers import AutoConfig

from kvalign.models.architectures import FAMILIES, rotation_of, spec_of
from kvalign.models.loading import load_model
from kvalign.models.rope import rerotate


def test_every_known_architecture_is_tested():
    assert {*KINDS, *MORE_KINDS} == set(FAMILIES)


def test_spec_is_what_the_cache_holds(model, ids):
    spec = spec_of(model.config, "tiny")
    cache = model(input_ids=ids[:, :5], use_cache=True).past_key_values
    assert len(cache.layers) == spec.num_layers
    assert cache.layers[0].keys.shape == (2, spec.num_kv_heads, 5, spec.head_dim)
    assert spec.context_len == (None if spec.model_type == "bloom" else CONTEXT_LEN)


@pytest.mark.parametrize("kind", ROTARY_KINDS)
def test_rotary_models_have_fewer_kv_heads_than_heads_or_partial_rotation(models, kind):
    spec, pairs = spec_of(models[kind].config), len(rotation_of(models[kind]).inv_freq)
    if kind == "gpt_neox":
        assert 2 * pairs < spec.head_dim
    else:
        assert 2 * pairs == spec.head_dim and spec.num_kv_heads == 2


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_shifted_keys_are_the_keys_of_earlier_positions(scaling, theta, ids):
    """rerotate by s is RoPE at p - s: layer 0 of the same tokens, s positions later."""
    model = tiny_model("llama", rope_parameters=SCALINGS[scaling] | {"rope_theta": theta})
    ids, shift = ids[:, :12], 5
    at = [
        model(
            input_ids=ids,
            position_ids=torch.arange(start, start + 12)[None],
            use_cache=True,
        )
        .past_key_values.layers[0]
        .keys
        for start in (0, shift)
    ]
    assert torch.allclose(rerotate(at[1], shift, rotation_of(model).inv_freq), at[0], atol=1e-4)
    assert not torch.allclose(at[1], at[0], atol=1e-2)


def test_scaling_by_length_limits_the_cache():
    assert (
        spec_of(tiny_model("llama", rope_parameters=SCALINGS["longrope"]).config).context_len == 32
    )
    assert (
        spec_of(tiny_model("llama", rope_parameters=SCALINGS["dynamic"]).config).context_len
        == CONTEXT_LEN
    )


def test_unknown_scaling_is_refused(models):
    config = AutoConfig.for_model("llama")
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1e4}
    with pytest.raises(
        ValueError, match="RoPE scaling 'spiral' cannot be shifted.*known: default, linear"
    ):
        spec_of(config)


def test_unknown_architecture_is_refused_naming_the_known():
    with pytest.raises(ValueError, match="is a 'bert' model.*known: gpt2, opt"):
        spec_of(AutoConfig.for_model("bert"), "some-bert")


@pytest.mark.parametrize("name", ["gpt2-mini", "llama-mini"])
def test_shipped_models_load(name):
    loaded = load_model(name)
    assert (
        loaded.spec.context_len == 512
        and loaded.spec.num_layers == 6
        and loaded.spec.head_dim == 64
    )
    assert loaded.spec.num_kv_heads == {"gpt2-mini": 4, "llama-mini": 2}[name]
    assert len(loaded.tokenizer) == 8192
    text = "A tale of ½ café\n\n  = Title = <unk> 世界"
    assert loaded.tokenizer.decode(loaded.tokenizer(text)["input_ids"]) == text


def test_unknown_names_and_devices_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("kvalign.foundation.hub.is_reachable", lambda: False)
    with pytest.raises(
        ValueError, match="no model 'gpt2-mimi' here or on the hub.*; did you mean gpt2-mini"
    ):
        load_model("gpt2-mimi")
    with pytest.raises(ValueError, match="cannot load a model from folder"):
        load_model(str(tmp_path))
    with pytest.raises(ValueError, match="device 'warp' is not available here"):
        load_model("gpt2-mini", device="warp")
