"""What a window has lost, kept aside: entries without their position, found by what a query asks.

    slots   0 1 2 3 4 5 6 7 | 8 9 ...      a ring: the entry of token j lies in slot
            block 0         | block 1      (j - num_sinks) mod the number of slots

Each head of keys searches for itself, and each row has its own tokens. An entry is worth its score
with the query, less a little the older it is: of entries that say the same, the newest counts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvalign.cache.buffer import KV, Part, cat
from kvalign.cache.segments import SEGMENT_LEN
from kvalign.cache.sizes import CacheSizes

RECENCY = 2.0
"""By how much a score is worth less for each e-fold of age (eval/results/memory.md)."""
_SHORTEST = 256


class Found(NamedTuple):
    """What each of T queries takes back, in the order of time.

    Attributes:
        entries: [B, H, T, R, D], without their position.
        ages: [B, H, T, R] int64, tokens from each to the query.
        visible: [B, H, T, R] bool; what is not is no entry, or is in the window.
    """

    entries: KV
    ages: Tensor
    visible: Tensor


class Memory(Part):
    """The entries of one layer after the sinks: those in the window, and as many that it has lost
    as `sizes.memory` says; beyond that the oldest go.

    Args:
        like: of the shape [B, H, ?, D] and on the device of what is to be held.
        sizes: of the cache.

    Attributes:
        held: [B, H, S, D]; S doubles until all slots are there.
    """

    def __init__(self, like: KV, sizes: CacheSizes):
        self.sizes, block = sizes, sizes.recall_block
        # A segment is written before its first query looks for what its last tokens overwrite.
        most = sizes.memory + sizes.num_in_sight + SEGMENT_LEN + block
        self.most = -(-most // block) * block
        self.held = like.slots(0, 0)

    def write(self, seen: Sequence[int], new: KV) -> None:
        """Take the entries [B, H, T, D] of the tokens from each row's `seen` on, but for sinks."""
        num_sinks, num_new = self.sizes.num_sinks, new.keys.shape[2]
        self._grow(max(seen) + num_new - num_sinks)
        alike = len(set(seen)) == 1
        for row, start in [(slice(None), seen[0])] if alike else enumerate(seen):
            first = min(max(num_sinks - start, num_new - self.most, 0), num_new)
            slots = torch.arange(start + first, start + num_new, device=new.keys.device)
            slots = (slots - num_sinks) % max(self.num_slots, 1)
            for held, x in zip(self.held, new, strict=True):
                held[row].index_copy_(-2, slots, x[row][..., first:, :].detach())

    @property
    def num_slots(self) -> int:
        return self.held.keys.shape[2]

    def _grow(self, num: int) -> None:
        """Have slots for so many entries, or all that there may be."""
        if self.num_slots < min(num, self.most):
            block = self.sizes.recall_block
            longer = min(self.most, max(num, 2 * self.num_slots, _SHORTEST))
            self._lengthen(-(-longer // block) * block)

    def _lengthen(self, length: int) -> None:
        self.held = self.held.map(lambda x: pad(x, (0, 0, 0, length - x.shape[2])))

    def find(self, queries: Tensor, seen: Tensor, end: Sequence[int]) -> Found:
        """What scaled queries [B, H, G, T, D] ask for, of the entries that their windows have lost.

        Args:
            seen: [B, T] int64, tokens before each query.
            end: of each row, the tokens that have been written.
        """
        sizes, block = self.sizes, self.sizes.recall_block
        assert sizes.num_recalled is not None
        # 1. Which tokens lie in the slots, and which of them each query's window has lost.
        slots = torch.arange(self.num_slots, device=seen.device)
        last = torch.tensor(end, device=seen.device)[:, None] - 1 - sizes.num_sinks
        turns = (last - slots).div(self.num_slots, rounding_mode="floor")
        tokens = sizes.num_sinks + slots + turns * self.num_slots  # [B, S]; unwritten: below sinks
        ages = seen[..., None] - tokens[:, None]  # [B, T, S]
        lost = (ages > sizes.num_in_sight) & (tokens >= sizes.num_sinks)[:, None]
        lost &= ages <= sizes.num_in_sight + sizes.memory
        # 2. What they are worth to the one that asks most, of queries that share a head of keys.
        scores = (queries.to(self.held.keys.dtype) @ self.held.keys[:, :, None].mT).float().amax(2)
        worth = torch.where(lost, -RECENCY * ages.clamp_min(1).log(), -torch.inf)
        scores = scores + worth[:, None]  # [B, H, T, S]
        # 3. The best, or the blocks of the best, in the order of time.
        best = scores.unflatten(-1, (-1, block)).amax(-1).topk(sizes.num_recalled // block).indices
        found = (best[..., None] * block + slots[:block]).flatten(-2)  # [B, H, T, R]
        of_found = ages[:, None].expand(*found.shape[:3], -1).gather(-1, found)
        of_found, order = of_found.sort(-1, descending=True)
        found = found.gather(-1, order)
        visible = lost[:, None].expand(*found.shape[:3], -1).gather(-1, found)
        entries = self.held.map(lambda x: _at(x, found))
        return Found(entries, of_found, visible)

    def select(self, rows: Tensor) -> None:
        self.held = self.held.rows(rows.to(self.held.keys.device))

    def join(self, others: Sequence["Memory"]) -> None:
        for other in others:
            other._lengthen(max(x.num_slots for x in others))
        self.held = cat((x.held for x in others), dim=0)

    def used(self, seen: Sequence[int]) -> int:
        """Slots that hold anything once rows have seen so many tokens."""
        return max(0, min(max(seen) - self.sizes.num_sinks, self.most))


def _at(x: Tensor, slots: Tensor) -> Tensor:
    """Of x [B, H, S, D] the slots [B, H, T, R]: [B, H, T, R, D]."""
    index = slots.flatten(2)[..., None].expand(-1, -1, -1, x.shape[3])
    return x.gather(2, index).unflatten(2, slots.shape[2:])
