"""The relative form: score a stream in a few forward passes instead of one step a token.

When a realigner starts from birth, what the query of token t sees of the entry of token j depends
on t and j alone: with E(t) entries evicted before step t, the entry lies at position j - E(t), and

    logit(t, j) = q_t . place(anchor(k_j), j - E(t))      for sinks: q_t . k_j
    visible(t, j): j <= t, and j is a sink or j >= num_sinks + E(t)

Rotation and tables split place() into a part of the entry and a part of the position, so a segment
of tokens is one banded attention. Segments carry the last window of entries: memory does not grow
with the text, and the result is that of stepping.

It enters a model through the attention-function registry of transformers (BLOOM: through its mask),
so it needs no code for a single architecture.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvalign.realign import FromBirth, Realigner
from kvalign.sizes import CacheSizes

NAME = "kvalign-relative"
_REGISTERED = ("gpt2", "opt", "llama", "mistral", "qwen2", "qwen3", "gpt_neox")
_MASKED = ("bloom",)

_current: ContextVar["Segment"] = ContextVar("segment")


def is_exact(model: PreTrainedModel, cache_size: int, realigner: Realigner | None) -> bool:
    """Whether the relative form gives what stepping gives."""
    if model.config.model_type not in _REGISTERED + _MASKED:
        return False
    sliding_window = getattr(model.config, "sliding_window", None)
    if sliding_window is not None and sliding_window <= cache_size:
        return False
    if realigner is None:
        return True
    if not isinstance(realigner, FromBirth) or realigner.aligner is not realigner.table:
        return False
    return realigner.table is None or model.config.model_type in _REGISTERED


class Stream:
    """A text of [B, N] tokens as a `StreamingCache` sees it, segment by segment.

    Args:
        model, sizes, realigner: those of the cache, if `is_exact` of them.
    """

    def __init__(self, model: PreTrainedModel, sizes: CacheSizes, realigner: Realigner | None):
        assert is_exact(model, sizes.cache_size, realigner)
        self.model, self.sizes, self.realigner = model, sizes, realigner
        num_layers = model.config.num_hidden_layers
        self.cache = Cache(layers=[_Layer(self, i) for i in range(num_layers)])
        self.num_seen = 0

    def feed(self, ids: Tensor, logits_to_keep: int = 0) -> Tensor:
        """Logits [B, T, V] after each token of ids [B, T], or after the last few."""
        segment = Segment(self, self.num_seen, ids.shape[1], ids.device)
        self.num_seen += ids.shape[1]
        with _relative_attention(self.model, segment):
            return self.model(
                input_ids=ids,
                position_ids=segment.position[None],
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=logits_to_keep,
            ).logits


class Segment:
    """Where the queries and entries of one forward pass lie.

    Attributes:
        position: [T] int64, where each query is in the cache: its position at birth.
        now: [T, S] int64, where each query finds each entry after the sinks.
        hidden: [T, S'] bool, entries (sinks first) that a query does not see.
        turn: [T], by how much the window's frame is ahead of each query: E(t) - E(t0).
        in_frame: [S] int64, the positions of the entries after the sinks in that frame.
        carried: entries after the sinks that the next segment sees.
    """

    def __init__(self, stream: Stream, start: int, num_tokens: int, device: torch.device):
        t = torch.arange(start, start + num_tokens, device=device)
        sizes = stream.sizes
        dropped = sizes.num_dropped(t)  # E(t): of the entries before token t
        self.stream = stream
        end = start + num_tokens
        self.num_sinks = min(sizes.num_sinks, end)
        self.carried = end - self.num_sinks - sizes.num_dropped(end)
        oldest = self.num_sinks + int(dropped[0])  # entry after the sinks that is in sight
        j = torch.arange(oldest, end, device=device)
        self.position = t - dropped
        self.turn = dropped - dropped[0]
        self.in_frame = j - dropped[0]
        now = j - dropped[:, None]
        sinks = torch.arange(self.num_sinks, device=device)
        self.hidden = torch.cat([sinks > t[:, None], (j > t[:, None]) | (now < sizes.num_sinks)], 1)
        self.now = now.clamp(0, sizes.cache_size)

    def attend(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        """Attention of a query [B, H, T, D] over kept entries [B, H_kv, S', D]: [B, T, H, D]."""
        num_sinks, groups = self.num_sinks, query.shape[1] // keys.shape[1]
        query = query.float().unflatten(1, (-1, groups)) * scale  # [B, H_kv, G, T, D]
        keys, values = keys.float()[:, :, None], values.float()[:, :, None]
        realigner = self.stream.realigner
        rotation = table = None
        if isinstance(realigner, FromBirth):
            rotation, table = realigner.rotation, realigner.table
        turned, window = query, keys[..., num_sinks:, :]
        if rotation is not None:
            turned = rotation.shift(query, -self.turn)
            window = rotation.shift(window, -self.in_frame)
        scores = turned @ window.mT  # [B, H_kv, G, T, S]
        if table is not None:
            means, scales = table.key[layer], table.key_scale[layer]
            if rotation is not None:
                positions = torch.arange(means.shape[1], device=means.device)
                means = rotation.shift(means, -positions)
            of_position = query @ means[:, None].mT  # [B, H_kv, G, T, P]
            scores = scores * scales[:, self.now][:, None] + of_position.gather(
                -1, self.now.expand_as(scores)
            )
        scores = torch.cat([query @ keys[..., :num_sinks, :].mT, scores], -1)
        weights = scores.masked_fill(self.hidden, -torch.inf).softmax(-1)
        if table is None:
            out = weights @ values
        else:
            means, scales = table.value[layer], table.value_scale[layer]
            of_sinks, of_window = weights.split([num_sinks, len(self.in_frame)], -1)
            places = weights.new_zeros(*weights.shape[:-1], means.shape[1])
            places = places.scatter_add(-1, self.now.expand_as(of_window), of_window)
            of_window = of_window * scales[:, self.now][:, None]
            out = torch.cat([of_sinks, of_window], -1) @ values + places @ means[:, None]
        return out.flatten(1, 2).transpose(1, 2)

    def alibi_mask(self, dtype: torch.dtype) -> Tensor:
        """What BLOOM adds to its scores [1, H, T, S']: its own bias goes by index among the entries
        handed in, which is right in the window and wrong by E(t) - E(t0) for a sink.
        """
        model = self.stream.model
        ones = torch.ones(1, 2, device=self.turn.device)
        slopes = model.base_model.build_alibi_tensor(ones, model.config.num_attention_heads, dtype)
        mask = slopes.new_zeros(1, len(slopes), *self.hidden.shape)
        mask[..., : self.num_sinks] = slopes[:, :, 1:] * self.turn[:, None]
        return mask.masked_fill(self.hidden, torch.finfo(dtype).min)


class _Layer(DynamicLayer):
    """What the next segment sees: sinks as they are, other entries as `anchor` leaves them."""

    is_croppable = False
    keys: Tensor
    values: Tensor

    def __init__(self, stream: Stream, layer: int):
        super().__init__()
        self.stream, self.layer = stream, layer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Take in [B, H, T, D]; return what the segment sees, sinks first."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        segment, realigner = _current.get(), self.stream.realigner
        stored, num_sinks = self.get_seq_length(), self.stream.sizes.num_sinks
        skip = max(num_sinks - stored, 0)  # sinks among the new entries
        keys, values = key_states, value_states
        if realigner is not None:
            new_keys, new_values = keys[:, :, skip:], values[:, :, skip:]
            birth = segment.position[skip:]
            anchored = realigner.anchor(self.layer, new_keys, new_values, birth)
            keys = torch.cat([keys[:, :, :skip], anchored[0].to(self.dtype)], 2)
            values = torch.cat([values[:, :, :skip], anchored[1].to(self.dtype)], 2)
        if stored:
            keys, values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        self.keys, self.values = (
            torch.cat([x[:, :, :num_sinks], x[:, :, x.shape[2] - segment.carried :]], 2)
            for x in (keys, values)
        )
        return keys, values


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    scaling = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = _current.get().attend(module.layer_idx, query, key, value, scale)
    return out.to(query.dtype), None


def _mask(*args: Any, dtype: torch.dtype = torch.float32, config: Any = None, **kwargs: Any) -> Any:
    segment = _current.get()
    has_bias = segment.stream.model.config.model_type in _MASKED
    return segment.alibi_mask(dtype) if has_bias else None


@contextmanager
def _relative_attention(model: PreTrainedModel, segment: Segment) -> Iterator[None]:
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    before, token = model.config._attn_implementation, _current.set(segment)
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before
        _current.reset(token)
