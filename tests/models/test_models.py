"""Specs of every family, RoPE scalings that shift exactly, and refusals."""

import pytest
import torch
from helpers.tiny_models import CONTEXT_LEN, KINDS, MORE_KINDS, SCALINGS, tiny_model
from transformers import AutoConfig

from kvalign.models.architectures import FAMILIES, rotation_of, spec_of


def test_every_known_architecture_is_tested():
    assert {*KINDS, *MORE_KINDS} == set(FAMILIES)


def test_spec_is_what_the_cache_holds(model, ids):
    spec = spec_of(model.config, "tiny")
    cache = model(input_ids=ids[:, :5], use_cache=True).past_key_values
    assert len(cache.layers) == spec.num_layers
    assert cache.layers[0].keys.shape == (2, spec.num_kv_heads, 5, spec.head_dim)
    assert spec.context_len == (None if spec.model_type == "bloom" else CONTEXT_LEN)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_shifted_keys_are_the_keys_of_earlier_positions(scaling, theta, ids):
    """A shift by s is RoPE at p - s: layer 0 of the same tokens, s positions later."""
    model = tiny_model("llama", rope_parameters=SCALINGS[scaling] | {"rope_theta": theta})
    ids, shift = ids[:, :12], 5
    places = [torch.arange(start, start + 12)[None] for start in (0, shift)]
    outs = [model(input_ids=ids, position_ids=x, use_cache=True) for x in places]
    at = [out.past_key_values.layers[0].keys for out in outs]
    assert torch.allclose(rotation_of(model).shift(at[1], shift), at[0], atol=1e-4)
    assert not torch.allclose(at[1], at[0], atol=1e-2)


def test_unknown_architecture_is_refused_naming_the_known():
    with pytest.raises(ValueError, match="is a 'bert' model.*known: gpt2, opt"):
        spec_of(AutoConfig.for_model("bert"), "some-bert")
