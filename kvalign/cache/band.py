"""Attention of each query to its own token and a fixed number of tokens before it, by PyTorch's
flash kernels, and to sinks: a segment of a streaming cache, where entries are read as they lie.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def band(
    query: Tensor, keys: Tensor, values: Tensor, width: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of the queries of the last tokens, [B, H, T, D], over keys [B, H_kv, S, D]: each
    over its own token's and those of `width` tokens before. It is 0 or not a number where there is
    none.

    Returns:
        its output [B, T, H, D], and the logarithms of the sums of exponentials, [B, H, T] float32.
    """
    num_rows, _, num, _ = query.shape
    num_keys = keys.shape[2]
    ends = (
        torch.arange(0, (num_rows + 1) * n, n, dtype=torch.int32, device=query.device)
        for n in (num, num_keys)
    )
    packed = (x.transpose(1, 2).flatten(0, 1) for x in (query, keys, values))
    kernel = flash()
    assert kernel is not None
    out, sums = kernel(*packed, *ends, num, num_keys, scale=scale, window_size=(width, 0))
    return out.unflatten(0, (num_rows, num)), sums.unflatten(1, (num_rows, num)).transpose(0, 1)


def band_and_sinks(
    query: Tensor,
    rotated: Tensor,
    keys: Tensor,
    values: Tensor,
    num_sinks: int,
    num_early: int,
    at: Tensor,
    width: int,
    scale: float,
) -> Tensor:
    """Attention of queries [B, H, T, D] over sinks and a band, in two parts that are merged by the
    logarithms of their sums of exponentials: [B, T, H, D].

    Args:
        query, rotated: in one form for the sinks and one for the band.
        keys, values: [B, H_kv, S, D], sinks first.
        num_early: queries before the end of the sinks, which see no band.
        at: [T] int64, the token of each query.
    """
    sinks, window = keys.tensor_split([num_sinks], 2)
    of_sinks, of_window = values.tensor_split([num_sinks], 2)
    out, sums = band(rotated, window, of_window, width, scale)
    if not num_sinks:
        return out
    if num_early:
        out[:, :num_early], sums[:, :, :num_early] = 0, -torch.inf
    grouped = query.unflatten(1, (sinks.shape[1], -1))
    scores = (grouped.flatten(2, 3) @ sinks.mT).unflatten(2, grouped.shape[2:4]).float()
    scores = scores.flatten(1, 2) * scale  # [B, H, T, num_sinks]
    if num_early:
        unseen = torch.arange(num_sinks, device=scores.device) > at[:, None]
        scores = scores.masked_fill(unseen, -torch.inf)
    both = torch.logaddexp(scores.logsumexp(-1), sums)  # [B, H, T]
    weights = (scores - both[..., None]).exp().to(values.dtype)
    weights = weights.unflatten(1, (sinks.shape[1], -1))
    out_of_sinks = (weights.flatten(2, 3) @ of_sinks).unflatten(2, weights.shape[2:4])
    out_of_sinks = out_of_sinks.flatten(1, 2).transpose(1, 2)
    share = (sums - both).exp().transpose(1, 2)[..., None]
    return torch.addcmul(out_of_sinks.float(), out.float(), share).to(query.dtype)


@functools.cache
def flash() -> Callable[..., Any] | None:
    """PyTorch's flash attention over bands, which also returns the logarithms of sums; None: this
    version has none.
    """
    try:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn
    except ImportError:
        return None
    options = inspect.signature(varlen_attn).parameters
    if "window_size" not in options:
        return None
    of_groups: Any = {"enable_gqa": True} if "enable_gqa" in options else {}
    return functools.partial(varlen_attn, return_aux=AuxRequest(lse=True), **of_groups)
