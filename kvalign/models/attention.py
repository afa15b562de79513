"""Attention of models, with entries that are placed when they are read.

A layer of the cache marks the keys that it returns with a function that reads them (`mark`). The
model's attention function is wrapped once (`install`), in the registry of transformers. Marked keys
are read by their function; all others go to the original function. So plain calls of the model,
several streams and scoring can share it, also in threads.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import _active_collector

from kvalign.foundation.errors import UserError
from kvalign.models.architectures import ModelSpec, window_of

ReadKeys = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Of a query [B, H, T, D], keys, values [B, H_kv, S, D] and the scale: [B, T, H, D]."""

_PREFIX = "kvalign_"
MARK = "_kvalign_read"
"""Attribute of marked keys: the function that reads them."""

_mask: ContextVar[Tensor | None] = ContextVar("mask", default=None)


def mark(keys: Tensor, read: ReadKeys) -> Tensor:
    """Return the same keys [B, H, S, D] with a mark: the function that reads them."""
    keys._kvalign_read = read  # type: ignore[attr-defined]
    return keys


def install(config: PretrainedConfig) -> None:
    """Let the attention of the model with this config accept marked keys; once is enough."""
    name = config._attn_implementation or "eager"
    if name.startswith(_PREFIX):
        return
    if _PREFIX + name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(_PREFIX + name, _wrapped(name))
        if name in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(_PREFIX + name, _masking(name))
    config._attn_implementation = _PREFIX + name


@contextmanager
def own_mask(mask: Tensor) -> Iterator[None]:
    """Context in which this thread's models use this mask [B, H, T, S] instead of making one."""
    token = _mask.set(mask)
    try:
        yield
    finally:
        _mask.reset(token)


def rows_mask(model: PreTrainedModel, spec: ModelSpec, visible: Tensor, num_before: int) -> Tensor:
    """Return the model's own form of a mask for one token in each row: the entries that rows see,
    [B, S] bool, of which the first is at position `num_before` in the longest row.
    """
    config = model.config
    hidden = ~visible[:, None, None]
    if config.model_type == "mpt":
        return hidden
    if spec.family == "alibi":  # from which it counts positions
        return visible.long()
    if window_of(config) is not None:  # which it adds to a mask of all its positions
        return pad(visible.long(), (num_before, 0))
    return torch.finfo(model.dtype).min * hidden.to(model.dtype)


def bloom_mask(model: PreTrainedModel, visible: Tensor, shift: Tensor, num_sinks: int) -> Tensor:
    """Return BLOOM's mask for entries [T, S'] that queries see or do not, sinks first, whose bias
    is that of `shift` [T] positions less.
    """
    dtype, ones = model.dtype, torch.ones(1, 2, dtype=torch.float32, device=shift.device)
    slopes = model.base_model.build_alibi_tensor(ones, model.config.num_attention_heads, dtype)
    mask = slopes.new_zeros(1, len(slopes), *visible.shape)
    mask[..., :num_sinks] = slopes[:, :, 1:] * shift[:, None]
    return mask.masked_fill(~visible, torch.finfo(dtype).min)


def _wrapped(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        read: ReadKeys | None = getattr(key, MARK, None)
        if read is None:
            modeling = sys.modules[type(module).__module__]
            eager = getattr(modeling, "eager_attention_forward", None)
            before = ALL_ATTENTION_FUNCTIONS.get(name, eager)
            return before(module, query, key, value, *args, **kwargs)
        # Of a pass that is to return attention weights.
        if not torch.compiler.is_compiling() and "attentions" in (_active_collector.get() or {}):
            raise UserError(
                "output_attentions: a cache with a table, a memory or a policy that reads weights "
                "gives none; `kvalign eval attention` measures the model's"
            )
        scaling = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return read(query, key, value, scale).to(query.dtype), None

    return attention


def _masking(name: str) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("q_length") == 1:
            padding, window = kwargs.get("attention_mask"), kwargs.get("local_size")
            if kwargs.get("kv_offset", 0) < 0:  # fewer tokens so far than slots
                return None  # OPT has a mask of its own for these; marks hide the other slots
            if name == "sdpa" and padding is None and window is None:
                return None  # as sdpa_mask does, except in a graph that is compiled
        elif (own := _mask.get()) is not None:
            return own
        return ALL_MASK_ATTENTION_FUNCTIONS[name](*args, **kwargs)

    return mask
