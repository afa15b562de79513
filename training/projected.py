"""Position tables without training: what each layer's projections make of the position embeddings.

    k <- k - A p_i + A p_j        A the layer's key (value) projection, p_i the embedding of i

Aldea et al. 2024 mention it and take networks instead: a layer norm stands before A, and later
layers see more than a sum of token and position. It is the baseline that needs no text at all.
"""

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvalign.aligners import TableAligner
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import ModelSpec


@torch.no_grad()
def project_positions(
    table: TableAligner, model: PreTrainedModel, spec: ModelSpec, kvs: tuple[str, ...]
) -> None:
    """Set the means of a table to the projected embeddings of its positions; biases, which they
    contain, cancel in each move.

    Raises:
        UserError: the model's positions are not learned.
    """
    if spec.family != "learned":
        raise UserError(f"--objective projected is for learned positions, not {spec.family} ones")
    blocks = next(
        module
        for module in model.base_model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == spec.num_layers
    )
    zeros = torch.zeros(1, table.config.chunk_len, model.config.hidden_size)
    zeros = zeros.to(model.device, model.get_input_embeddings().weight.dtype)
    embeddings: list[Tensor] = []

    def see(block: nn.Module, args: tuple, kwargs: dict) -> None:
        embeddings.append(args[0] if args else kwargs["hidden_states"])

    def project(attention: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (embeddings[0], *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": embeddings[0]}

    # The first block is given the sum of token and position; with tokens of zero, the positions.
    hooks = [blocks[0].register_forward_pre_hook(see, with_kwargs=True)]
    for block in blocks:
        attention = next(x for x in block.modules() if type(x).__name__.endswith("Attention"))
        hooks.append(attention.register_forward_pre_hook(project, with_kwargs=True))
    cache = DynamicCache()
    try:
        model.base_model(inputs_embeds=zeros, past_key_values=cache, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    for kv in kvs:
        means = torch.cat([getattr(layer, f"{kv}s") for layer in cache.layers])  # [L, H, P, D]
        getattr(table, kv).copy_(means)
