"""The model that pretraining begins with: random, or with the weights of another one."""

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from kvalign.foundation.errors import UserError
from kvalign.models.loading import load_model
from kvalign.training.settings import HEAD_DIM, PretrainSettings


def build_model(settings: PretrainSettings, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Random model of the given shape; heads of 64 dimensions, Llama with half as many for KV."""
    hidden, num_heads = settings.hidden_size, settings.hidden_size // HEAD_DIM
    common = dict(
        vocab_size=len(tokenizer),
        max_position_embeddings=settings.context_len,
        hidden_size=hidden,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=num_heads,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    if settings.arch == "gpt2":
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(**common, **no_dropout)
    else:
        config = transformers.LlamaConfig(
            **common,
            intermediate_size=3 * hidden,
            num_key_value_heads=max(1, num_heads // 2),
            tie_word_embeddings=True,
        )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def first_model(settings: PretrainSettings, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Model of the given shape to begin with: random, or with the weights of another one.

    Raises:
        UserError: that one has another shape.
    """
    model = build_model(settings, tokenizer)
    if settings.init is None:
        return model
    weights = load_model(settings.init).model.state_dict()
    for name, weight in model.state_dict().items():
        there = list(weights[name].shape) if name in weights else "missing"
        if there != list(weight.shape):
            raise UserError(
                f"--init {settings.init} is another architecture or size: {name} is {there} there, "
                f"{list(weight.shape)} here"
            )
    model.load_state_dict(weights)
    return model
