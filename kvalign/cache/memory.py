"""What a window has lost, kept aside: entries without their position, found by what a query asks.

    slots   0 1 2 3 4 5 6 7 | 8 9 ...      a ring; the entry of token j lies in slot
            block 0         | block 1      (j - num_sinks) mod the number of slots

Each layer and head of keys searches for itself. Rows are independent: each has its own tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvalign.cache.buffer import KV, Part
from kvalign.cache.segments import SEGMENT_LEN
from kvalign.cache.sizes import CacheSizes


class Found(NamedTuple):
    """What T queries of a row take back, in the order of time.

    Attributes:
        entries: [B, H, T, R, D], without their position.
        tokens: [B, H, T, R] int64, of which tokens of the stream.
        visible: [B, H, T, R] bool; what is not is no entry, or is in the window already.
    """

    entries: KV
    tokens: Tensor
    visible: Tensor


class Memory(Part):
    """The entries of one layer after the sinks: those in the window, and as many that it has lost
    as `sizes.memory` says. It grows by doubling; when it is full, the oldest go.

    Args:
        like: of the shape [B, H, ?, D] and on the device of what is to be held.
        sizes: of the cache.

    Attributes:
        held: [B, H, S, D], a ring once it has all its slots.
    """

    def __init__(self, like: KV, sizes: CacheSizes):
        self.sizes, block = sizes, sizes.recall_block
        # A segment is written before its first query looks for what the last of it overwrites.
        most = sizes.memory + sizes.num_in_sight + SEGMENT_LEN + block
        self.most = -(-most // block) * block
        self.held = like.map(lambda x: x.new_zeros(*x.shape[:2], 0, x.shape[3]))

    def write(self, seen: Sequence[int], new: KV) -> None:
        """Take the entries [B, H, T, D] of the tokens from each row's `seen` on; sinks are left
        out.
        """
        num_sinks, num_new = self.sizes.num_sinks, new.keys.shape[2]
        self._grow(max(seen) + num_new - num_sinks)
        size = self.held.keys.shape[2]
        for row, start in enumerate(seen) if len(set(seen)) > 1 else [(slice(None), seen[0])]:
            first = min(max(num_sinks - start, num_new - self.most, 0), num_new)
            slots = torch.arange(start + first, start + num_new) - num_sinks
            slots = (slots % max(size, 1)).to(new.keys.device)
            for held, x in zip(self.held, new, strict=True):
                held[row].index_copy_(-2, slots, x[row, :, first:].detach().to(held.dtype))

    def _grow(self, num: int) -> None:
        """Have slots for so many entries, or all."""
        size = self.held.keys.shape[2]
        if num <= size or size == self.most:
            return
        block = self.sizes.recall_block
        longer = min(self.most, max(-(-num // block) * block, 2 * size))
        self.held = self.held.map(lambda x: pad(x, (0, 0, 0, longer - size)))

    def find(self, queries: Tensor, seen: Tensor, end: Sequence[int]) -> Found:
        """What queries [B, H, G, T, D] ask for, of the entries that their windows have lost.

        Args:
            seen: [B, T] int64, tokens before each query.
            end: of each row, the tokens that have been written.
        """
        sizes, block, device = self.sizes, self.sizes.recall_block, queries.device
        assert sizes.num_recalled is not None
        num_sinks, size = sizes.num_sinks, self.held.keys.shape[2]
        # The newest token that was written to each slot; of those never written below the sinks.
        slots, last = torch.arange(size, device=device), torch.tensor(end, device=device)[:, None]
        last = last - 1 - num_sinks
        tokens = num_sinks + slots + (last - slots).div(size, rounding_mode="floor") * size
        newest = (seen - sizes.num_in_sight)[..., None]  # [B, T, 1], the first in the window
        oldest = (newest - sizes.memory).clamp_min(num_sinks)
        visible = (tokens[:, None] >= oldest) & (tokens[:, None] < newest)  # [B, T, S]
        scores = (queries.float() @ self.held.keys.float()[:, :, None].mT).amax(2)  # [B, H, T, S]
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        num = sizes.num_recalled // block
        best = scores.unflatten(-1, (-1, block)).amax(-1).topk(min(num, size // block), -1).indices
        picked = (best[..., None] * block + slots[:block]).flatten(-2)  # [B, H, T, R]
        at = tokens[:, None, None].expand(*picked.shape[:3], -1).gather(-1, picked)
        at, order = at.sort(-1)
        picked = picked.gather(-1, order)
        seen_by = visible[:, None].expand(*picked.shape[:3], -1).gather(-1, picked)
        num_rows, num_heads, num_queries, num = picked.shape
        index = picked.flatten(2)[..., None]
        entries = self.held.map(
            lambda x: x.gather(2, index.expand(-1, -1, -1, x.shape[3])).unflatten(
                2, (num_queries, num)
            )
        )
        return Found(entries, at, seen_by)

    def select(self, rows: Tensor) -> None:
        self.held = self.held.rows(rows.to(self.held.keys.device))

    def join(self, others: Sequence["Memory"]) -> None:
        size = max(x.held.keys.shape[2] for x in others)
        padded = [
            x.held.map(lambda y, x=x: pad(y, (0, 0, 0, size - x.held.keys.shape[2])))
            for x in others
        ]
        self.held = KV(*(torch.cat(parts) for parts in zip(*padded, strict=True)))
