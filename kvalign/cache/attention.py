"""Segments: many tokens in one banded attention, with the same results as feeding them one by one.

The entry of token j looks the same to the query of token t however the input was cut. With E(t)
entries evicted and moved by M(t) positions before step t, the entry lies at position j - M(t), and

    logit(t, j) = q_t . place(anchor(k_j), j - M(t))      for sinks: q_t . k_j
    visible(t, j): j <= t, and j is a sink or j >= num_sinks + E(t)

Rotation and tables split place() into a part of the entry and a part of the position:

    q . (m[p] + s[p] k') = q . m[p] + s[p] (q . k')

So entries that were written once can be read at every later position, and a segment gives the same
results as decode steps. This needs no code for a single architecture (`kvalign.models.attention`;
BLOOM: through its mask). In half precision on CUDA, entries that are read where they lie are a band
for PyTorch's flash kernel.
"""

import functools
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import PreTrainedModel

from kvalign.aligners.entries import KV
from kvalign.aligners.table import Tables
from kvalign.cache.sizes import CacheSizes
from kvalign.models.attention import bloom_mask
from kvalign.models.rope import Rotation

SEGMENT_LEN = 512  # tokens of a forward pass
BLOCK_LEN = 64  # queries whose scores are made at once: few see what another does not
SEGMENT_ON_GPU, BLOCK_ON_GPU = 4096, 512  # there each call takes time, however little it does


TablesOf = Callable[[int], Tables | None]
"""Tables that place a layer's entries when they are read; None: they are read where they lie."""


class RecalledEntries(NamedTuple):
    """Attention over what the queries of a block take back from a memory, and over that alone."""

    output: Tensor  # [B, H, G, T, D], 0 where there is nothing
    log_sum: Tensor  # [B, H, G, T] float32, logarithm of the sum of the exponentials


Recaller = Callable[["Block", Tensor], RecalledEntries]
"""Recalled entries for the scaled queries [B, H, G, T, D] of a block."""


class Segment:
    """Positions of the queries and entries of one forward pass; rows have equal lengths.

    Args:
        sizes, frame, rotation, tables: of the cache and its realigner.
        num_seen: tokens before the segment.
        num_ahead: the last of its tokens that are guesses: they do not count.

    Attributes:
        ahead: their entries, as each layer stores them.
        birth: [T] int64, each token's original position: its place.
        at: [T] int64, its position in the frame of the entries before it, to which rotary keys are
            rotated.
        behind: [T] int64, the difference; 0 without rotation.
        dropped: [T] int64, entries evicted before each query.
    """

    def __init__(
        self,
        sizes: CacheSizes,
        frame: CacheSizes,
        rotation: Rotation | None,
        tables: TablesOf,
        num_seen: int,
        num_tokens: int,
        device: torch.device,
        num_ahead: int = 0,
    ):
        self.num_ahead, self.ahead = num_ahead, list[KV]()
        self.sizes, self.rotation, self.tables, self.num_seen = sizes, rotation, tables, num_seen
        end = num_seen + num_tokens
        self.t = torch.arange(num_seen, end, device=device)
        self.dropped = sizes.num_dropped(self.t)  # E(t): of the entries before token t
        self.num_moved = self.dropped if rotation else frame.num_moved(self.t)
        self.last_position = (sizes if rotation else frame).last_position
        self.birth = self.t - self.num_moved
        self.at = self.t - frame.num_moved(num_seen) if rotation else self.birth
        self.behind = self.at - self.birth
        # What Python decides by is computed here: to ask a GPU would be to wait for it.
        self.num_dropped = sizes.num_dropped(num_seen)
        last_dropped = sizes.num_dropped(end - 1)
        self.rotates = rotation is not None and last_dropped > frame.num_moved(num_seen)
        self.num_sinks = min(sizes.num_sinks, end)
        self.oldest = self.num_sinks + self.num_dropped  # in sight, of those after the sinks
        self._blocks: dict[int, list[Block]] = {}

    def blocks(self, num_recalled: int) -> list["Block"]:
        """Blocks whose queries' windows give up so many entries for what is recalled."""
        if num_recalled not in self._blocks:
            num_tokens, on_cpu = len(self.t), self.t.device.type == "cpu"
            length = BLOCK_LEN if on_cpu else BLOCK_ON_GPU
            starts = range(0, num_tokens, length)
            blocks = [Block(self, x, min(x + length, num_tokens), num_recalled) for x in starts]
            for before, block in pairwise(blocks):
                if torch.equal(before.now, block.now):
                    block.now = before.now
            self._blocks[num_recalled] = blocks
        return self._blocks[num_recalled]

    def rotate(self, layer: int, x: Tensor) -> Tensor:
        """Queries or keys [..., T, D] of a rotary model, in the frame of the entries before."""
        rotation = self.rotation if self.rotates else None
        return rotation.at(layer).shift(x, -self.behind) if rotation else x

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        recall: Recaller | None = None,
    ) -> Tensor:
        """Attention of a query [B, H, T, D] over kept entries [B, H_kv, S', D], sinks first, and
        over recalled ones: [B, T, H, D].
        """
        num_heads, tables, outputs = keys.shape[1], self.tables(layer), []
        rotated, num_recalled = self.rotate(layer, query), (recall and self.sizes.num_recalled) or 0
        is_plain, on_cpu = tables is None and recall is None, query.device.type == "cpu"
        if is_plain and self.sizes.num_evicted == 1 and has_band_kernel(query):
            of_sinks = self.num_sinks, max(self.sizes.num_sinks - self.num_seen, 0), self.t
            of_window = self.sizes.window_size, scale
            return band_and_sinks(query, rotated, keys, values, *of_sinks, *of_window)
        if is_plain and self.rotates and self.num_sinks:
            # A CPU is faster without its kernel than with one of twice the size.
            is_plain = not on_cpu
            if is_plain:
                rotated, keys, values = both_forms(query, rotated, keys, values, self.num_sinks)
        scales: dict[int, tuple[Tensor, Tensor]] = {}  # of blocks that find their entries alike
        for block in self.blocks(num_recalled):
            ours = rotated[:, :, block.queries]
            if is_plain:
                k, v = block.entries(keys), block.entries(values)
                if not on_cpu:  # whose fused kernels take as many heads of each
                    k, v = (x.repeat_interleave(ours.shape[1] // num_heads, 1) for x in (k, v))
                mask, gqa = block.mask(query.dtype), {"enable_gqa": True} if on_cpu else {}
                out = scaled_dot_product_attention(ours, k, v, mask, scale=scale, **gqa)
                outputs.append(out[..., : query.shape[-1]])
                continue
            # The sinks, and the tables, are where the query's place is, not where it is rotated to.
            placed, ours = (
                x.float().unflatten(1, (num_heads, -1)) * scale
                for x in (query[:, :, block.queries], ours)
            )
            k, v = (block.entries(x).float()[:, :, None] for x in (keys, values))
            recalled = recall(block, placed) if recall and block.has_lost else None
            if tables is None:
                weights, of_recalled = block.weights(*block.scores(placed, ours, k), recalled)
                out = _by_head(weights, v) + of_recalled
            else:
                if id(block.now) not in scales:
                    scales = {id(block.now): block.scales(tables)}
                of_block = *scales[id(block.now)], recalled
                out = block.read(placed, ours, k, v, tables, *of_block)
            outputs.append(out.flatten(1, 2).to(query.dtype))
        return torch.cat(outputs, 2).transpose(1, 2)

    def alibi_mask(self, model: PreTrainedModel) -> Tensor:
        """Return a correction for BLOOM's scores [1, H, T, S']. BLOOM adds a bias by index among
        the given entries. That is right in the window, and wrong by E(t) - E(t0) for a sink.
        """
        visible = Block(self, 0, len(self.t), 0).visible
        return bloom_mask(model, visible, self.dropped - self.dropped[0], self.num_sinks)


class Block:
    """Some queries of a segment, and the entries that any of them sees.

    Attributes:
        queries: their slice of the segment.
        window: slice of its entries after the sinks.
        visible: [T, S'] bool, entries (sinks first) that each query sees.
        now: [T, S] int64, the position of each entry after the sinks for each query.
    """

    def __init__(self, segment: Segment, start: int, stop: int, num_recalled: int):
        sizes, self.num_sinks = segment.sizes, segment.num_sinks
        self.queries = slice(start, stop)
        t, dropped, num_moved = (
            x[self.queries, None] for x in (segment.t, segment.dropped, segment.num_moved)
        )
        first = sizes.num_dropped(segment.num_seen + start) - segment.num_dropped
        end = segment.num_seen + stop - segment.oldest
        self.window = slice(self.num_sinks + first, self.num_sinks + max(first, end))
        j = segment.oldest + torch.arange(first, max(first, end), device=t.device)
        sinks = torch.arange(self.num_sinks, device=t.device)
        # What is recalled takes the places of the window's oldest entries.
        num_lost = dropped + num_recalled * (dropped > 0)
        self.has_lost = bool(num_lost.any())
        in_window = (j <= t) & (j - num_lost >= sizes.num_sinks)
        self.visible = torch.cat([sinks <= t, in_window], 1)
        self.num_positions = segment.last_position + 1
        self.now = (j - num_moved).clamp(0, segment.last_position)  # anywhere, if it is not visible
        self._mask: Tensor | None = None

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Mask [T, S'], added to scores: 0 if visible, -inf elsewhere; the same for all layers."""
        if self._mask is None or self._mask.dtype != dtype:
            self._mask = self.visible.to(dtype).log()
        return self._mask

    def entries(self, x: Tensor) -> Tensor:
        """Return the segment's entries [B, H, S', D] that the block sees, sinks first."""
        window = x[:, :, self.window]
        return torch.cat([x[:, :, : self.num_sinks], window], 2) if self.num_sinks else window

    def scales(self, tables: Tables) -> tuple[Tensor, Tensor]:
        """Return the scales of keys and values at their positions for each query: [H, 1, T, S]."""
        return tables.key_scales[:, None, self.now], tables.value_scales[:, None, self.now]

    def read(
        self,
        placed: Tensor,
        rotated: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tables,
        key_scales: Tensor,
        value_scales: Tensor,
        recalled: RecalledEntries | None,
    ) -> Tensor:
        """Attention of queries [B, H, G, T, D], in one form for the sinks and one for the window,
        over entries [B, H, 1, S', D], each at its position for each query.
        """
        now, sizes = self.now, [self.num_sinks, self.now.shape[1]]
        of_sinks, of_window = self.scores(placed, rotated, keys)
        key_means, value_means = (
            x[:, None, : self.num_positions] for x in (tables.key_means, tables.value_means)
        )
        of_position = placed @ key_means.mT  # [B, H, G, T, P]
        of_window = of_window * key_scales + of_position.gather(-1, now.expand_as(of_window))
        weights, of_recalled = self.weights(of_sinks, of_window, recalled)
        of_sinks, of_window = weights.split(sizes, -1)
        places = torch.zeros_like(of_position)
        places.scatter_add_(-1, now.expand_as(of_window), of_window)
        weights = torch.cat([of_sinks, of_window * value_scales], -1)
        return _by_head(weights, values) + places @ value_means + of_recalled

    def scores(self, placed: Tensor, rotated: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [B, H, G, T, S'] of sinks and of the window, of queries as of `read`."""
        sinks, window = keys.tensor_split([self.num_sinks], -2)
        return _by_head(placed, sinks.mT), _by_head(rotated, window.mT)

    def weights(
        self, of_sinks: Tensor, of_window: Tensor, recalled: RecalledEntries | None
    ) -> tuple[Tensor, Tensor | float]:
        """Weights [B, H, G, T, S'] of entries, and the output of recalled ones, as if one entry."""
        own = () if recalled is None else (recalled.log_sum[..., None],)
        scores, num = torch.cat([of_sinks, of_window, *own], -1), self.visible.shape[1]
        scores[..., :num].masked_fill_(~self.visible, -torch.inf)
        weights, own_weight = scores.softmax(-1).tensor_split([num], -1)
        return weights, 0.0 if recalled is None else own_weight * recalled.output


def _by_head(x: Tensor, y: Tensor) -> Tensor:
    """x [B, H, G, T, M] @ y [B, H, 1, M, N], a product for each head: broadcasting would copy y."""
    return (x.flatten(2, 3) @ y[:, :, 0]).unflatten(2, x.shape[2:4])


def has_band_kernel(query: Tensor) -> bool:
    """Return whether `band`, attention of each query to its own token and a fixed number of tokens
    before it, has a kernel for such queries: on CUDA, in half precision.
    """
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


def both_forms(
    query: Tensor, rotated: Tensor, keys: Tensor, values: Tensor, num_sinks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of twice the size, whose one product has both forms of a query: its
    place beside the sinks, and its position in the frame beside the window.
    """
    sinks, window = keys.tensor_split([num_sinks], 2)
    keys = torch.cat([pad(sinks, (0, sinks.shape[3])), pad(window, (window.shape[3], 0))], 2)
    return torch.cat([query, rotated], -1), keys, pad(values, (0, values.shape[3]))


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
