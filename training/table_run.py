"""Training of position tables: the mean and the scale of keys and values at each position of a
text, in one pass; with another objective, then tuned through the frozen model.

The baseline `projected` needs no text. It uses each layer's projection of the position embeddings.

    k <- k - A p_i + A p_j        A the layer's key (value) projection, p_i the embedding of i

Aldea et al. 2024 mention it but use networks: a layer norm stands before A, and later layers see
more than a sum of token and position.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvalign.aligners import Aligner, TableAligner
from kvalign.aligners.kinds import TARGETS
from kvalign.cache.realign import realigner_of
from kvalign.cache.realigner import is_exact
from kvalign.cache.sizes import CacheSizes
from kvalign.data_gen.pairs import positionless
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import ModelSpec
from kvalign.models.loading import LoadedModel
from kvalign.training.kinds import TableSettings
from kvalign.training.table_objectives import tune, tuning_tokens
from kvalign.training.text import Text
from kvalign.training.text_run import BATCH_SIZE


def fit(
    table: TableAligner, settings: TableSettings, loaded: LoadedModel, text: Text
) -> dict[str, Any]:
    """Fill untrained tables, as the settings ask.

    Returns:
        the result of `tune`, unless the objective takes no steps.
    """
    model, chunk_len = loaded.model, settings.chunk_len
    table.check(model, CacheSizes(chunk_len - 1, 0))
    in_segments = is_exact(model, chunk_len - 1, realigner_of(model, table))
    trained = settings.objective not in ("mse", "projected")
    if trained and not in_segments:
        raise UserError(
            f"--objective {settings.objective} is not for {loaded.spec.model_type} models: their "
            "attention does not go through transformers' registry; use mse"
        )
    num_tokens = text.chunks("train", chunk_len).numel() if settings.init == "means" else 0
    num_tokens += tuning_tokens(table, text, settings) if trained else 0
    progress.expect(num_tokens, "tokens computed")
    record: dict[str, Any] = {}
    if settings.objective == "projected":
        project_positions(table, model, loaded.spec, settings.kvs)
        record["objective"] = settings.objective
    elif settings.init == "means":
        standardise(table, model, text.chunks("train", chunk_len), settings.kvs)
    elif settings.init != "none":
        _start_from(table, settings.init, model)
    if trained:
        record |= tune(table, model, text, settings)
    return record


def _start_from(table: TableAligner, name: str, model: PreTrainedModel) -> None:
    """Copy the tables of another aligner, for the same model and as long."""
    other = Aligner.from_pretrained(name)
    if not isinstance(other, TableAligner) or other.config.chunk_len != table.config.chunk_len:
        raise UserError(
            f"--init {name}: a table of chunk_len {table.config.chunk_len} is needed, got "
            f"{other.config.kind} of {other.config.chunk_len}"
        )
    other.check(model, CacheSizes(other.config.chunk_len - 1, 0))
    table.load_state_dict(other.state_dict(), strict=False)  # which has no network of its own


@torch.no_grad()
def standardise(
    table: TableAligner, model: PreTrainedModel, chunks: Tensor, kvs: tuple[str, ...]
) -> None:
    """Set the tables to mean and scale over chunks [N, chunk_len]; keys of rotary models unrotated.

    A scale is relative to that of the last position: 1 leaves an entry's size unchanged.
    """
    sums, squares = (
        {kv: torch.zeros(table.key.shape, dtype=torch.float64) for kv in kvs} for _ in range(2)
    )
    progress.phase("means")
    for ids in chunks.split(BATCH_SIZE):
        entries = dict(zip(TARGETS, positionless(model, ids), strict=True))
        for kv in kvs:
            # A batch in float32, all of them in float64, whose sums take far longer.
            sums[kv] += entries[kv].sum(0).cpu()
            squares[kv] += entries[kv].square_().sum(0).cpu()
        progress.advance(ids.numel())
    for kv in kvs:
        means = sums[kv] / len(chunks)
        deviations = (squares[kv] / len(chunks) - means.square()).mean(-1).clamp(min=0).sqrt()
        scales = (deviations / deviations[..., -1:]).nan_to_num(1, 1, 1)
        getattr(table, kv).copy_(means)
        # Where nothing varies (a single chunk, a fixed first token) there is nothing to scale by.
        getattr(table, f"{kv}_scale").copy_(torch.where(scales > 0, scales, 1))


@torch.no_grad()
def project_positions(
    table: TableAligner, model: PreTrainedModel, spec: ModelSpec, kvs: tuple[str, ...]
) -> None:
    """Set the means of a table to the projected embeddings of its positions. They contain biases,
    which cancel in each move.

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
    shape = 1, table.config.chunk_len, model.config.hidden_size
    zeros = torch.zeros(shape, dtype=model.dtype, device=model.device)
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
