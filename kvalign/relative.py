"""The relative form: attention over entries that are placed when they are read.

What the query of token t sees of the entry of token j depends on t and j alone: with E(t) entries
dropped and moved by M(t) places before step t, the entry lies at position j - M(t), and

    logit(t, j) = q_t . place(anchor(k_j), j - M(t))      for sinks: q_t . k_j
    visible(t, j): j <= t, and j is a sink or j >= num_sinks + E(t)

Rotation and tables split place() into a part of the entry and a part of the position:

    q . (m[p] + s[p] k') = q . m[p] + s[p] (q . k')

So entries that were written once are read at every later position (`read_step`, one query), and a
segment of many tokens is one banded attention with the result of stepping (`Segment`): how an input
is cut does not matter. Neither needs code for a single architecture (`kvalign.attention`; BLOOM:
through its mask).
"""

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.attention import REGISTERED, install, own_mask
from kvalign.realign import OnRead, Realigner, Rotating
from kvalign.step import Step

if TYPE_CHECKING:
    from kvalign.cache import StreamingCache

SEGMENT_LEN = 256  # tokens of a forward pass

_MASKED = ("bloom",)


def is_exact(model: PreTrainedModel, cache_size: int, realigner: Realigner | None) -> bool:
    """Whether the relative form gives what stepping gives."""
    if model.config.model_type not in REGISTERED + _MASKED:
        return False
    sliding_window = getattr(model.config, "sliding_window", None)
    if sliding_window is not None and sliding_window <= cache_size:
        return False
    return realigner is None or isinstance(realigner, Rotating | OnRead)


def feed(
    model: PreTrainedModel, cache: "StreamingCache", ids: Tensor, logits_to_keep: int = 0
) -> Tensor:
    """Take in ids [B, T] as a segment: logits [B, T, V] after each token, or after the last few, as
    if each was fed alone. Memory grows with T * (C + T): cut long inputs.
    """
    num_seen = cache.seen[0] if cache.seen else 0
    segment = Segment(cache, num_seen, ids.shape[1], ids.device)
    install(model.config)
    masked = model.config.model_type in _MASKED
    cache.segment = segment
    try:
        with own_mask(segment.alibi_mask(model)) if masked else nullcontext():
            return model(
                input_ids=ids,
                # Attention knows what is visible: no mask is made.
                attention_mask=None if masked else ids.new_ones(1, 1, 1, 1),
                position_ids=segment.birth[None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=logits_to_keep,
            ).logits
    finally:
        cache.segment = None


class Segment:
    """Where the queries and entries of one forward pass lie; rows are of equal length.

    Attributes:
        birth: [T] int64, the position that each token is computed at: its place in the cache.
        at: [T] int64, its position in the frame of the entries before: rotary keys turn there.
        behind: [T] int64, the difference: 0 where nothing rotates.
        now: [T, S] int64, where each query finds each entry after the sinks.
        hidden: [T, S'] bool, entries (sinks first) that a query does not see.
    """

    def __init__(
        self, cache: "StreamingCache", num_seen: int, num_tokens: int, device: torch.device
    ):
        sizes, realigner, end = cache.sizes, cache.realigner, num_seen + num_tokens
        t = torch.arange(num_seen, end, device=device)
        dropped = sizes.num_dropped(t)  # E(t): of the entries before token t
        self.realigner, self.rotation = realigner, realigner.rotation if realigner else None
        moved = dropped if self.rotation else cache.frame.num_moved(t)
        self.birth = t - moved
        self.at = t - cache.frame.num_moved(num_seen) if self.rotation else self.birth
        self.behind = self.at - self.birth
        self.turns = self.rotation is not None and bool(self.behind.any())
        self.dropped = dropped
        self.num_sinks = min(sizes.num_sinks, end)
        oldest = self.num_sinks + int(dropped[0])  # entry after the sinks that is in sight
        j = torch.arange(oldest, end, device=device)
        sinks = torch.arange(self.num_sinks, device=device)
        gone = j - dropped[:, None] < sizes.num_sinks
        self.hidden = torch.cat([sinks > t[:, None], (j > t[:, None]) | gone], 1)
        # What is hidden may lie anywhere.
        self.now = (j - moved[:, None]).clamp(0, sizes.last_position)

    def turned(self, x: Tensor) -> Tensor:
        """Queries or keys [..., T, D] of a rotary model, in the frame of the entries before."""
        if not self.turns:
            return x
        assert self.rotation is not None
        return self.rotation.shift(x, -self.behind)

    def attend(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        """Attention of a query [B, H, T, D] over kept entries [B, H_kv, S', D], sinks first: [B, T,
        H, D].
        """
        num_sinks, groups = self.num_sinks, query.shape[1] // keys.shape[1]
        query = query.float().unflatten(1, (-1, groups)) * scale  # [B, H_kv, G, T, D]
        keys, values = keys.float()[:, :, None], values.float()[:, :, None]
        on_read = self.realigner if isinstance(self.realigner, OnRead) else None
        table = on_read.table if on_read else None
        scores = self.turned(query) @ keys[..., num_sinks:, :].mT  # [B, H_kv, G, T, S]
        if on_read is not None:
            means, scales = on_read.turned_means(layer), on_read.table.key_scale[layer]
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
            of_sinks, of_window = weights.split([num_sinks, self.now.shape[1]], -1)
            places = weights.new_zeros(*weights.shape[:-1], means.shape[1])
            places = places.scatter_add(-1, self.now.expand_as(of_window), of_window)
            of_window = of_window * scales[:, self.now][:, None]
            out = torch.cat([of_sinks, of_window], -1) @ values + places @ means[:, None]
        return out.flatten(1, 2).transpose(1, 2)

    def alibi_mask(self, model: PreTrainedModel) -> Tensor:
        """What BLOOM adds to its scores [1, H, T, S']: its own bias goes by index among the entries
        handed in, which is right in the window and wrong by E(t) - E(t0) for a sink.
        """
        turn, dtype = self.dropped - self.dropped[0], model.dtype
        ones = torch.ones(1, 2, device=turn.device)
        slopes = model.base_model.build_alibi_tensor(ones, model.config.num_attention_heads, dtype)
        mask = slopes.new_zeros(1, len(slopes), *self.hidden.shape)
        mask[..., : self.num_sinks] = slopes[:, :, 1:] * turn[:, None]
        return mask.masked_fill(self.hidden, torch.finfo(dtype).min)


def read_step(
    step: Step, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """Attention of one query [B, H, 1, D] over all that a layer with tables holds [B, H_kv, S', D]:
    [B, 1, H, D]. Sinks lie at their places; rows may be of unequal lengths.
    """
    realigner, sinks = step.realigner, step.sizes.num_sinks
    assert isinstance(realigner, OnRead)
    table, half = realigner.table, keys.dtype != torch.float32
    query = query.unflatten(1, (keys.shape[1], -1)).squeeze(3) * scale  # [B, H_kv, G, D]
    placed = query
    if realigner.rotation is not None:
        placed = realigner.rotation.shift(query, step.per_row(step.behind))
    scores = (query @ keys.mT).float()  # [B, H_kv, G, S']
    first, num = step.first_place, keys.shape[2]
    num_sinks = min(sinks, num)
    key_means, value_means = realigner.turned_means(layer), table.value[layer]
    key_scales, value_scales = table.key_scale[layer], table.value_scale[layer]
    if step.places is None:  # all rows alike: the window's places are a slice of the tables
        now = slice(first, first + num - num_sinks)
        window = scores[..., num_sinks:]
        window.mul_(key_scales[:, None, now]).add_(by_head(placed.float(), key_means[:, now].mT))
        weights = scores.softmax(-1)
        window = weights[..., num_sinks:]
        out = by_head(window, value_means[:, now])
        window.mul_(value_scales[:, None, now])
    else:
        # [B, 1, 1, S'] each; `places` is 0 and `inside` false at sinks and at what a row lacks.
        places, inside = step.places[:, None, None], step.inside[:, None, None]
        of_position = by_head(placed.float(), key_means.mT).gather(-1, places.expand_as(scores))
        of_entry = scores * key_scales[:, places[:, 0, 0]].transpose(0, 1)[:, :, None]
        scores = torch.where(inside, of_entry + of_position, scores)
        scores = scores.masked_fill(~step.visible[:, None, None], -torch.inf)
        weights = scores.softmax(-1)
        of_window = weights * inside
        shares = weights.new_zeros(*weights.shape[:-1], value_means.shape[1])
        shares = shares.scatter_add(-1, places.expand_as(of_window), of_window)
        out = by_head(shares, value_means)
        value_scales = value_scales[:, places[:, 0, 0]].transpose(0, 1)[:, :, None]
        weights = torch.where(inside, weights * value_scales, weights)
    out = out + (weights.to(values.dtype) if half else weights) @ values
    return out.flatten(1, 2)[:, None]


def by_head(x: Tensor, table: Tensor) -> Tensor:
    """x [B, H, G, M] @ table [H, M, N], which the rows of a batch share: [B, H, G, N]. One product
    a head; broadcast, the table would be copied for each row.
    """
    num_rows, num_heads, num_groups, _ = x.shape
    product = x.transpose(0, 1).flatten(1, 2) @ table  # [H, B * G, N]
    return product.view(num_heads, num_rows, num_groups, -1).transpose(0, 1)
