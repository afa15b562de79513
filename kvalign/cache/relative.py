"""The relative form: attention over entries that are placed when they are read.

What the query of token t sees of the entry of token j depends on t and j alone: with E(t) entries
dropped and moved by M(t) places before step t, the entry lies at position j - M(t), and

    logit(t, j) = q_t . place(anchor(k_j), j - M(t))      for sinks: q_t . k_j
    visible(t, j): j <= t, and j is a sink or j >= num_sinks + E(t)

Rotation and tables split place() into a part of the entry and a part of the position:

    q . (m[p] + s[p] k') = q . m[p] + s[p] (q . k')

So entries that were written once are read at every later position (`read_step`, one query), and a
segment of many tokens is one banded attention with the result of stepping (`Segment`): how an input
is cut does not matter. Neither needs code for a single architecture (`kvalign.models.attention`;
BLOOM: through its mask).
"""

from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from kvalign.cache.realign import OnRead, Realigner, Rotating
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.step import Step
from kvalign.models.attention import REGISTERED, install, own_mask

if TYPE_CHECKING:
    from kvalign.cache.streaming_cache import StreamingCache

SEGMENT_LEN = 512  # tokens of a forward pass
BLOCK_LEN = 64  # queries whose scores are made at once: few see what another does not

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
        dropped: [T] int64, entries gone before each query.
    """

    def __init__(
        self, cache: "StreamingCache", num_seen: int, num_tokens: int, device: torch.device
    ):
        self.sizes, self.realigner, self.end = cache.sizes, cache.realigner, num_seen + num_tokens
        self.rotation = cache.realigner.rotation if cache.realigner else None
        self.t = torch.arange(num_seen, self.end, device=device)
        self.dropped = self.sizes.num_dropped(self.t)  # E(t): of the entries before token t
        self.moved = self.dropped if self.rotation else cache.frame.num_moved(self.t)
        self.birth = self.t - self.moved
        self.at = self.t - cache.frame.num_moved(num_seen) if self.rotation else self.birth
        self.behind = self.at - self.birth
        self.turns = self.rotation is not None and bool(self.behind.any())
        self.num_sinks = min(self.sizes.num_sinks, self.end)
        # The first entry after the sinks that is in sight.
        self.oldest = self.num_sinks + int(self.dropped[0])
        starts = range(0, num_tokens, BLOCK_LEN)
        self.blocks = [Block(self, x, min(x + BLOCK_LEN, num_tokens)) for x in starts]
        for before, block in pairwise(self.blocks):
            if torch.equal(before.now, block.now):
                block.now = before.now

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
        num_heads, turned, found = keys.shape[1], self.turned(query), []
        on_read = self.realigner if isinstance(self.realigner, OnRead) else None
        of_places = PlacedTables(on_read, layer, self.sizes) if on_read else None
        for block in self.blocks:
            ours = turned[:, :, block.queries]
            if of_places is None and not (self.turns and self.num_sinks):
                k, v = block.entries(keys), block.entries(values)
                mask = block.mask(query.dtype)
                found.append(
                    scaled_dot_product_attention(ours, k, v, mask, scale=scale, enable_gqa=True)
                )
                continue
            # The sinks, and the tables, are where the query's place is, not where it has turned.
            placed, ours = (
                x.float().unflatten(1, (num_heads, -1)) * scale
                for x in (query[:, :, block.queries], ours)
            )
            k, v = (block.entries(x).float()[:, :, None] for x in (keys, values))
            out = block.read(placed, ours, k, v, of_places)
            found.append(out.flatten(1, 2).to(query.dtype))
        return torch.cat(found, 2).transpose(1, 2)

    def alibi_mask(self, model: PreTrainedModel) -> Tensor:
        """What BLOOM adds to its scores [1, H, T, S']: its own bias goes by index among the entries
        handed in, which is right in the window and wrong by E(t) - E(t0) for a sink.
        """
        turn, dtype = self.dropped - self.dropped[0], model.dtype
        visible = Block(self, 0, len(self.t)).visible
        ones = torch.ones(1, 2, device=turn.device)
        slopes = model.base_model.build_alibi_tensor(ones, model.config.num_attention_heads, dtype)
        mask = slopes.new_zeros(1, len(slopes), *visible.shape)
        mask[..., : self.num_sinks] = slopes[:, :, 1:] * turn[:, None]
        return mask.masked_fill(~visible, torch.finfo(dtype).min)


class Block:
    """Some queries of a segment, and the entries that any of them sees.

    Attributes:
        queries: which of the segment.
        window: which of its entries after the sinks.
        visible: [T, S'] bool, entries (sinks first) that each query sees.
        now: [T, S] int64, where each query finds each entry after the sinks.
    """

    def __init__(self, segment: Segment, start: int, stop: int):
        sizes, self.num_sinks = segment.sizes, segment.num_sinks
        self.queries = slice(start, stop)
        t, dropped, moved = (
            x[self.queries, None] for x in (segment.t, segment.dropped, segment.moved)
        )
        first, end = int(dropped[0] - segment.dropped[0]), int(t[-1]) + 1 - segment.oldest
        self.window = slice(self.num_sinks + first, self.num_sinks + max(first, end))
        j = segment.oldest + torch.arange(first, max(first, end), device=t.device)
        sinks = torch.arange(self.num_sinks, device=t.device)
        in_window = (j <= t) & (j - dropped >= sizes.num_sinks)
        self.visible = torch.cat([sinks <= t, in_window], 1)
        # What is not visible may lie anywhere.
        self.now = (j - moved).clamp(0, sizes.last_position)
        self._mask: Tensor | None = None

    def mask(self, dtype: torch.dtype) -> Tensor:
        """[T, S'], added to scores: 0 where visible, -inf elsewhere; the same for all layers."""
        if self._mask is None or self._mask.dtype != dtype:
            self._mask = self.visible.to(dtype).log()
        return self._mask

    def entries(self, x: Tensor) -> Tensor:
        """Of the segment's [B, H, S', D] those that the block sees, sinks first."""
        window = x[:, :, self.window]
        return torch.cat([x[:, :, : self.num_sinks], window], 2) if self.num_sinks else window

    def read(
        self,
        placed: Tensor,
        turned: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: "PlacedTables | None",
    ) -> Tensor:
        """Attention of queries [B, H, G, T, D], as they see the sinks and as they see the window,
        over entries [B, H, 1, S', D]; with tables each is placed where each query finds it.
        """
        scores = self._scores(placed, turned, keys)
        if tables is None:
            return self._weights(scores) @ values
        now, sizes = self.now, [self.num_sinks, self.now.shape[1]]
        key_scales, value_scales = tables.scales(now)
        of_sinks, of_window = scores.split(sizes, -1)
        of_position = placed @ tables.key_means.mT  # [B, H, G, T, P]
        of_window = of_window * key_scales + of_position.gather(-1, now.expand_as(of_window))
        weights = self._weights(torch.cat([of_sinks, of_window], -1))
        of_sinks, of_window = weights.split(sizes, -1)
        places = torch.zeros_like(of_position)
        places = places.scatter_add(-1, now.expand_as(of_window), of_window)
        weights = torch.cat([of_sinks, of_window * value_scales], -1)
        return weights @ values + places @ tables.value_means

    def _scores(self, placed: Tensor, turned: Tensor, keys: Tensor) -> Tensor:
        sinks, window = keys[..., : self.num_sinks, :], keys[..., self.num_sinks :, :]
        return torch.cat([placed @ sinks.mT, turned @ window.mT], -1)

    def _weights(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(~self.visible, -torch.inf).softmax(-1)


class PlacedTables:
    """A layer's tables for the positions that there are: means [H, 1, P, D]."""

    def __init__(self, realigner: OnRead, layer: int, sizes: CacheSizes):
        table, num = realigner.table, sizes.last_position + 1
        self.key_means = realigner.turned_means(layer)[:, None, :num]
        self.value_means = table.value[layer][:, None, :num]
        self._scales = table.key_scale[layer], table.value_scale[layer]
        self._now: Tensor | None = None

    def scales(self, now: Tensor) -> tuple[Tensor, Tensor]:
        """Of keys and of values at each place of now [T, S]: [H, 1, T, S]; made once for blocks
        that find their entries alike.
        """
        if now is not self._now:
            self._now = now
            self._found = self._scales[0][:, now][:, None], self._scales[1][:, now][:, None]
        return self._found


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
        placed = realigner.rotation.shift(query, step.behind_rows.to(keys.device))
    scores = (query @ keys.mT).float()  # [B, H_kv, G, S']
    first, num = step.first_place, keys.shape[2]
    num_sinks = min(sinks, num)
    key_means, value_means = realigner.step_means[layer], table.value[layer]
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
        places, inside, visible = (
            x[:, None, None].to(keys.device) for x in (step.places, step.inside, step.visible)
        )
        of_position = by_head(placed.float(), key_means.mT).gather(-1, places.expand_as(scores))
        of_entry = scores * key_scales[:, places[:, 0, 0]].transpose(0, 1)[:, :, None]
        scores = torch.where(inside, of_entry + of_position, scores)
        scores = scores.masked_fill(~visible, -torch.inf)
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
