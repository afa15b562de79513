"""Attention over a band by PyTorch's flash kernel on CUDA: each query sees its own token and a
fixed number of tokens before it.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def has_band_kernel(query: Tensor) -> bool:
    """Return whether `band` has a kernel for such queries: on CUDA, in half precision."""
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return query.device.type == "cuda" and is_half and _flash() is not None


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
    kernel = _flash()
    assert kernel is not None
    out, sums = kernel(*packed, *ends, num, num_keys, scale=scale, window_size=(width, 0))
    return out.unflatten(0, (num_rows, num)), sums.unflatten(1, (num_rows, num)).transpose(0, 1)


@functools.cache
def _flash() -> Callable[..., Any] | None:
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
