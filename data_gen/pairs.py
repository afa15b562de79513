"""Training pairs: an entry of a full cache after an eviction, and the same entry by re-encoding.

    tokens    s s s s e 5 6 7 8   encode all: K, V at positions 0..8; of slots 5..8: stale
    evict e   s s s s   5 6 7 8   encode the rest: K, V at positions 0..7; of slots 4..7: aligned

(4 sinks s, num_evicted = 1; Aldea, Hwang, Kim, Liang 2024.) Stale keys of rotary models are first
rotated to their new positions. That part of the move is exact; an aligner learns the rest.
"""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvalign.foundation.errors import UserError
from kvalign.models.architectures import rotation_of, spec_of
from kvalign.models.loading import LoadedModel

Pairs = tuple[Tensor, Tensor, Tensor, Tensor]


@torch.no_grad()
def encode(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of ids [B, T] in an empty cache, of all layers: [B, L, H, T, D] each.

    Raises:
        UserError: a hybrid model, which has layers without them.
    """
    spec = spec_of(model.config)
    if spec.states:
        raise UserError(
            f"aligners do not work with {spec.name or 'this model'}: some layers have a state "
            "instead of entries; streaming-llm needs no aligner"
        )
    cache = DynamicCache()  # not made from the config: sliding-window layers keep every entry too
    model.base_model(input_ids=ids.to(model.device), past_key_values=cache, use_cache=True)
    keys, values = ([getattr(x, name) for x in cache.layers] for name in ("keys", "values"))
    return torch.stack(keys, dim=1), torch.stack(values, dim=1)


def positionless(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Entries of `encode` in float32, with the keys of rotary models rotated back to position 0."""
    keys, values = (x.float() for x in encode(model, ids))
    if rotation := rotation_of(model):
        keys = rotation.shift_layers(keys, torch.arange(ids.shape[1]), dim=1)
    return keys, values


def record_pairs(
    loaded: LoadedModel, ids: Tensor, num_sinks: int, shifts: tuple[int, ...]
) -> dict[int, Pairs]:
    """Stale and aligned keys and values of chunks.

    Args:
        ids: [B, T] int64, chunks without special tokens.
        num_sinks: first entries, which are never evicted.
        shifts: numbers of entries evicted right after the sinks.

    Returns:
        of each shift: key_stale, key_aligned, value_stale, value_aligned,
        [B, L, H, T - num_sinks - shift, D] each, in the model's dtype.
    """
    keys, values = encode(loaded.model, ids)
    rotation, pairs = rotation_of(loaded.model), {}
    for shift in shifts:
        rest = torch.cat([ids[:, :num_sinks], ids[:, num_sinks + shift :]], dim=1)
        key_aligned, value_aligned = (x[..., num_sinks:, :] for x in encode(loaded.model, rest))
        key_stale, value_stale = (x[..., num_sinks + shift :, :] for x in (keys, values))
        if rotation:
            key_stale = rotation.shift_layers(key_stale, shift, dim=1)
        pairs[shift] = (key_stale, key_aligned, value_stale, value_aligned)
    return pairs


def squared_error(stale: Tensor, aligned: Tensor) -> float:
    """Sum of squared differences in float64, a chunk at a time: [num_chunks, ...] each."""
    pairs = zip(stale, aligned, strict=True)
    return sum((a.double() - b.double()).square().sum().item() for a, b in pairs)
