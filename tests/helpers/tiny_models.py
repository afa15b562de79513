"""Tiny random models of every architecture, built in memory; shipped ones with fewer layers."""

from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvalign.models.architectures import REGISTERED, spec_of
from kvalign.models.loading import LoadedModel

VOCAB, CONTEXT_LEN = 96, 64

_BEFORE = dict(factor=2.0, original_max_position_embeddings=32)
SCALINGS = {
    "linear": dict(factor=4.0),
    "llama3": dict(_BEFORE, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": dict(factor=4.0, original_max_position_embeddings=16),
    "dynamic": dict(factor=2.0),
    "longrope": dict(_BEFORE, short_factor=[1.0, 1.5, 2.0, 3.0], long_factor=[2.0, 3.0, 4.0, 5.0]),
}
SCALINGS = {kind: dict(rope_type=kind, **scaling) for kind, scaling in SCALINGS.items()}
"""RoPE scalings, as `rope_parameters` of a rotary model."""

_WIDTH = dict(max_position_embeddings=CONTEXT_LEN, hidden_size=32)
_OPT = dict(num_hidden_layers=2, num_attention_heads=2, ffn_dim=64, word_embed_proj_dim=32)
_NEO = dict(num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]])
_SHAPES = {
    "gpt2": dict(n_positions=CONTEXT_LEN, n_embd=32, n_layer=2, n_head=2),
    "opt": _WIDTH | _OPT,
    "gpt_neo": dict(_WIDTH | _NEO, window_size=CONTEXT_LEN),
    "bloom": dict(hidden_size=32, n_layer=2, n_head=2),
    "mpt": dict(max_seq_len=CONTEXT_LEN, d_model=32, n_layers=2, n_heads=2),
}
_ROTARY = dict(_WIDTH, intermediate_size=64, num_hidden_layers=2)
_ROTARY |= dict(num_attention_heads=4, num_key_value_heads=2)
_SHAPES |= dict.fromkeys(("llama", "mistral", "qwen2"), _ROTARY)
_SHAPES["qwen3"] = dict(_ROTARY, head_dim=16)
_SHAPES["gpt_neox"] = {k: v for k, v in _ROTARY.items() if k != "num_key_value_heads"}
KINDS = tuple(_SHAPES)
"""Architectures that the whole matrix of tests runs on."""
REGISTERED_KINDS = [kind for kind in KINDS if kind in REGISTERED]
ROTARY_KINDS = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox")

_GPT = dict(n_positions=CONTEXT_LEN, n_embd=32, n_layer=2, n_head=4)
_HEADS = dict(_ROTARY, head_dim=8)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2)
_OF_EXPERTS = dict(moe_intermediate_size=32)
_LOCAL_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
# Every other layer sees 8 entries: fewer than any cache in the tests.
_WINDOWS = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
_SHAPES |= dict.fromkeys(("arcee", "ernie4_5", "glm", "glm4", "helium", "nemotron"), _HEADS)
_SHAPES |= dict.fromkeys(("ministral3", "seed_oss"), _HEADS)
_SHAPES |= dict.fromkeys(("apertus", "cohere", "granite", "olmo", "olmo2", "phi"), _ROTARY)
_SHAPES |= dict.fromkeys(("phi3", "stablelm", "starcoder2"), _ROTARY)
_SHAPES |= dict.fromkeys(("codegen", "gptj"), _GPT | {"rotary_dim": 4})
_SHAPES |= dict.fromkeys(("falcon", "persimmon"), _SHAPES["gpt_neox"])
_SHAPES |= dict.fromkeys(("cohere2", "exaone4", "ministral"), _HEADS | _WINDOWS)
_SHAPES |= dict.fromkeys(("granitemoe", "mixtral"), _ROTARY | _LOCAL_EXPERTS)
_SHAPES |= {
    "gemma": dict(_ROTARY, head_dim=16),
    "gemma2": dict(_ROTARY, head_dim=16, query_pre_attn_scalar=16, **_WINDOWS),
    "gemma3_text": dict(_ROTARY, head_dim=16, query_pre_attn_scalar=16, **_WINDOWS),
    "gpt_bigcode": _GPT,
    "gpt_oss": _HEADS | _WINDOWS | _LOCAL_EXPERTS,
    "lfm2": dict(_ROTARY, layer_types=["conv", "full_attention"] * 2) | {"num_hidden_layers": 4},
    "llama4_text": dict(_HEADS, intermediate_size_mlp=64, num_local_experts=2)
    | dict(num_hidden_layers=4, num_experts_per_tok=1),
    "olmo3": _ROTARY | _WINDOWS,
    "olmoe": _ROTARY | _EXPERTS,
    "qwen2_moe": dict(_ROTARY | _EXPERTS, **_OF_EXPERTS, shared_expert_intermediate_size=32),
    "qwen3_moe": _HEADS | _EXPERTS | _OF_EXPERTS,
    "smollm3": dict(_ROTARY, no_rope_layers=[1, 0]),
}
MORE_KINDS = tuple(kind for kind in _SHAPES if kind not in KINDS)
"""The others, each of which goes through a few cases (`tests/methods/test_architectures.py`)."""


def tiny_model(kind: str, **changes) -> PreTrainedModel:
    """A random model of an architecture: 2 layers or 4, hidden 32, context 64; weights large enough
    to matter.
    """
    torch.manual_seed(0)
    ends = dict(bos_token_id=0, eos_token_id=0, pad_token_id=1)
    config = AutoConfig.for_model(kind, **(dict(vocab_size=VOCAB) | ends | _SHAPES[kind] | changes))
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return model.requires_grad_(False)


def first_layers(loaded: LoadedModel, num: int) -> LoadedModel:
    """The same model, cut in place: a step takes as much less. No aligner is for it."""
    model, inner = loaded.model, loaded.model.base_model
    name = "h" if hasattr(inner, "h") else "layers"
    setattr(inner, name, getattr(inner, name)[:num].eval())
    model.config.num_hidden_layers = num
    model.config.name_or_path = f"{num} layers of {loaded.spec.name}"
    return replace(loaded, spec=spec_of(model.config, loaded.spec.name))
