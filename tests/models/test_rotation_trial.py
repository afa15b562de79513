"""What turns the keys of a model is measured: right for what is listed, and for what no line names;
what no rotation moves is refused with what differed.
"""

import pytest
import torch
from helpers.methods import CACHE_SIZE, make, step
from helpers.pairwise import one_of_each
from helpers.tiny_models import MORE_KINDS, ROTARY_KINDS, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from kvalign.foundation.errors import UserError
from kvalign.models.architectures import FAMILIES, rotation_of, spec_of

HUNYUAN = dict(vocab_size=96, max_position_embeddings=64, hidden_size=32, intermediate_size=64)
HUNYUAN |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)


class RenamedConfig(LlamaConfig):
    model_type = "renamed"


class Renamed(LlamaForCausalLM):
    config_class = RenamedConfig


@pytest.fixture
def renamed():
    """Llama under a name that no line has."""
    llama = tiny_model("llama")
    config = RenamedConfig(**{k: v for k, v in llama.config.to_dict().items() if k != "model_type"})
    model = Renamed(config).eval().requires_grad_(False)
    model.load_state_dict(llama.state_dict())
    return model


ROTARY = [*ROTARY_KINDS, *(kind for kind in MORE_KINDS if FAMILIES[kind] == "rotary")]


@pytest.mark.parametrize(("kind", "dtype"), one_of_each(ROTARY, [torch.float32, torch.bfloat16]))
def test_a_key_that_was_moved_is_the_one_computed_there(kind, dtype):
    """By every layer, whatever precision it was measured in."""
    model = tiny_model(kind).to(dtype)
    rotation, exact = rotation_of(model), model.to(torch.float32)
    is_rounded = dtype == torch.bfloat16 and kind in ("codegen", "gptj")  # a table of angles
    near = 1e-2 if is_rounded else 1e-4
    ids = torch.full((1, 1), 7)
    here, there = (
        exact(input_ids=ids, position_ids=torch.tensor([[at]]), use_cache=True).past_key_values
        for at in (3, 45)
    )
    num_turning = 0
    layers = spec_of(exact.config).attention
    for i in layers:
        layer, other = here.layers[i], there.layers[i]
        moved = rotation.at(i).shift(other.keys, 42)
        assert torch.allclose(moved, layer.keys, atol=near * layer.keys.abs().max().item())
        num_turning += not torch.allclose(other.keys, layer.keys, atol=1e-2)
    has_still = kind in ("cohere2", "exaone4", "llama4_text", "smollm3")
    assert num_turning == len(layers) - has_still


def test_a_renamed_architecture_streams(renamed, ids):
    assert "renamed" not in FAMILIES and spec_of(renamed.config).family == "rotary"
    name = "streaming-llm"
    found, expected = (
        step(make(name, model), ids[:, :60], CACHE_SIZE + 1)
        for model in (renamed, tiny_model("llama"))
    )
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_norm_after_the_rotation_is_refused_with_what_differed():
    """Hunyuan's keys are scaled, number by number, once they are turned."""
    model = tiny_from(AutoConfig.for_model("hunyuan_v1_dense", **HUNYUAN))
    assert rotation_of(model) is not None  # scales of 1 leave a rotation a rotation
    model = tiny_from(AutoConfig.for_model("hunyuan_v1_dense", **HUNYUAN))
    for name, weight in model.named_parameters():
        if "key_layernorm" in name:
            weight.data = torch.linspace(0.2, 3, len(weight))
    with pytest.raises(
        UserError,
        match=r"this model \(hunyuan_v1_dense\) cannot be moved: no rotation moves a key of "
        r"layer 0: 0\.\d+ of its size is the small.*2 rotations.*use method discard-half",
    ):
        make("streaming-llm", model)
    assert make("recompute", model).feed(torch.ones(1, 5, dtype=torch.int64)).isfinite().all()


def tiny_from(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def test_scores_that_depend_on_the_position_are_refused(renamed, monkeypatch):
    """Keys are turned as they should be, queries are not."""
    right = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, *args: (q, right(q, *args)[1])
    )
    for model in (renamed, tiny_model("llama")):
        with pytest.raises(UserError, match="the score of a token with the one before it changes"):
            rotation_of(model)
