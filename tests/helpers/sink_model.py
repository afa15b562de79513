"""A tiny rotary model that needs its first token, as large models do, and a text that it knows.

What makes a sink of the first token (Xiao et al. 2024) is built in by hand: it alone attends to
itself alone, so the first layer's attention gives it more than any other; the MLP makes a large
activation of that; the second layer's queries all look for it, and beside it the values, which
would disturb the prediction, are as good as zero. Without that entry they do disturb it.
"""

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB, HIDDEN, CODE = 48, 32, 16
CONST, SIGN, MEAN, SINK = 16, 17, 18, 19  # dimensions of the hidden state, after the tokens' codes
SLOWEST = HIDDEN - 1  # of a head: the dimension that rotation leaves alone


def sink_model() -> tuple[PreTrainedModel, Tensor]:
    """The model, and the token [VOCAB] that it says follows each."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2,
        num_hidden_layers=2,
        num_attention_heads=1,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.zero_()
    first, second = model.model.layers
    codes = 4 * torch.nn.functional.normalize(torch.randn(VOCAB, CODE))
    embeddings = model.model.embed_tokens.weight
    embeddings[:, :CODE], embeddings[:, CONST] = codes, 2
    embeddings[:, SIGN] = 2 - 4 * (torch.arange(VOCAB) % 2)
    first.self_attn.v_proj.weight[0, SIGN] = 1  # the mean of signs: +-1 of one token, else less
    first.self_attn.o_proj.weight[MEAN, 0] = 1
    for unit, sign in enumerate((20, -20)):
        first.mlp.gate_proj.weight[unit, [MEAN, CONST]] = torch.tensor([sign, -16.0])
        first.mlp.up_proj.weight[unit, CONST] = 4
        first.mlp.down_proj.weight[SINK, unit] = 8
    second.self_attn.q_proj.weight[SLOWEST, CONST] = 6
    second.self_attn.k_proj.weight[SLOWEST, SINK] = 8
    second.self_attn.v_proj.weight[:CODE, :CODE] = torch.eye(CODE)
    second.self_attn.o_proj.weight[:CODE, :CODE] = 1.5 * torch.randn(CODE, CODE)
    follows = torch.randperm(VOCAB)
    model.lm_head.weight[follows, :CODE] = codes
    return model, follows


def sink_text(follows: Tensor, num_tokens: int) -> Tensor:
    """Tokens [N], nine in ten of which are what follows the one before."""
    rng, ids = torch.Generator().manual_seed(1), [3]
    drawn = torch.randint(VOCAB, (num_tokens,), generator=rng)
    for is_known, other in zip(torch.rand(num_tokens, generator=rng) < 0.9, drawn, strict=True):
        ids.append(int(follows[ids[-1]] if is_known else other))
    return torch.tensor(ids[:num_tokens])
