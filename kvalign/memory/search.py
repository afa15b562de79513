"""Parts of a search in a memory by operations of PyTorch, where our kernel does not search."""

import torch
from torch import Tensor
from torch.nn.functional import normalize


def products(queries: Tensor, keys: Tensor) -> Tensor:
    """Return products of queries [B, H, G, T, D] with keys [B, H, S, D]: [B, H, G, T, S]
    float32.
    """
    return (queries.flatten(2, 3) @ keys.mT).float().unflatten(2, queries.shape[2:4])


def alike_newer(keys: Tensor, newer: Tensor, is_lost: Tensor | None) -> Tensor:
    """Return for keys [..., M, D], in the order of time, the cosine of each with the newer one that
    is most like it: [..., M].

    Args:
        newer: as of `EvictedSlots`.
        is_lost: [..., M] bool, those that are compared; None: all.
    """
    if is_lost is None:
        apart = keys - keys.mean(-2, keepdim=True)
    else:
        keys = keys * is_lost[..., None]
        apart = keys - keys.sum(-2, keepdim=True) / is_lost.sum(-1)[..., None, None].clamp_min(1)
    apart = normalize(apart, dim=-1).flatten(0, -3)  # [N, M, D]
    alike = torch.baddbmm(newer.to(keys.dtype), apart, apart.mT).unflatten(0, keys.shape[:-2])
    if is_lost is not None:
        alike = alike.masked_fill(~is_lost[..., None, :], -torch.inf)
    return alike.amax(-1)


def at(x: Tensor, slots: Tensor) -> Tensor:
    """Return the slots [B, H, T, R] of x [B, H, S, D]: [B, H, T, R, D]."""
    num_rows, num_heads, num_slots, head_dim = x.shape
    firsts = torch.arange(0, num_rows * num_heads * num_slots, num_slots, device=x.device)
    rows = (slots.flatten(0, 1).flatten(1) + firsts[:, None]).flatten()
    return x.view(-1, head_dim).index_select(0, rows).view(*slots.shape, head_dim)
