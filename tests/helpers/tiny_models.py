"""Tiny random models of every architecture, built in memory."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB, CONTEXT_LEN = 96, 64

SCALINGS = {
    "linear": dict(rope_type="linear", factor=4.0),
    "llama3": dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    ),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    "dynamic": dict(rope_type="dynamic", factor=2.0),
    "longrope": dict(
        rope_type="longrope",
        factor=2.0,
        short_factor=[1.0, 1.5, 2.0, 3.0],
        long_factor=[2.0, 3.0, 4.0, 5.0],
        original_max_position_embeddings=32,
    ),
}
"""RoPE scalings, as `rope_parameters` of a rotary model."""

_SHAPES = {
    "gpt2": dict(n_positions=CONTEXT_LEN, n_embd=32, n_layer=3, n_head=2),
    "opt": dict(
        max_position_embeddings=CONTEXT_LEN,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        ffn_dim=64,
        word_embed_proj_dim=32,
    ),
    "gpt_neo": dict(
        max_position_embeddings=CONTEXT_LEN,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=CONTEXT_LEN,
    ),
    "bloom": dict(hidden_size=32, n_layer=3, n_head=2),
    "mpt": dict(max_seq_len=CONTEXT_LEN, d_model=32, n_layers=3, n_heads=2),
}
_ROTARY = dict(
    max_position_embeddings=CONTEXT_LEN,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
_SHAPES |= dict.fromkeys(("llama", "mistral", "qwen2"), _ROTARY)
_SHAPES["qwen3"] = dict(_ROTARY, head_dim=16)
_SHAPES["gpt_neox"] = {k: v for k, v in _ROTARY.items() if k != "num_key_value_heads"}
KINDS = tuple(_SHAPES)
ROTARY_KINDS = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox")


def tiny_model(kind: str, **changes) -> PreTrainedModel:
    """A random model of an architecture: 2 or 3 layers, hidden 32, context 64; weights large enough
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
