"""Random models of well-known shapes: weights do not change speed, so none are downloaded."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvalign.errors import UserError
from kvalign.models import check_device

PREFIX = "shape:"
SHAPES = {
    "distilgpt2": dict(model_type="gpt2", n_layer=6, n_head=12, n_embd=768, vocab_size=50257),
    "gpt2": dict(model_type="gpt2", n_layer=12, n_head=12, n_embd=768, vocab_size=50257),
    "smollm2-135m": dict(
        model_type="llama",
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        hidden_size=576,
        intermediate_size=1536,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
}


def build(name: str, device: str = "cpu", dtype: str = "float32", seed: int = 0) -> PreTrainedModel:
    """A random model of a shape, built from its config alone.

    Raises:
        UserError: unknown shape, or a device that this machine does not have.
    """
    if name not in SHAPES:
        raise UserError(f"unknown shape {name!r} (known: {', '.join(SHAPES)})")
    check_device(device)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**SHAPES[name])
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return model.to(device).eval().requires_grad_(False)
