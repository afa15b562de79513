"""What a window has lost, kept aside: entries without their position, found by what a query asks.

    slots   0 1 2 3 4 5 6 7 | 8 9 ...      a ring: the entry of token j lies in slot
            block 0         | block 1      (j - num_sinks) mod the number of slots

Each head of keys searches for itself, and each row has its own tokens. An entry is worth its score
with the query, less a little the older it is: of entries that say the same, the newest counts.

The least and the largest number of each dimension among the keys of a group of slots bound what
any of them may score (Quest, arXiv 2406.10774). So a search looks at groups first, and at the
entries of the best ones.
"""

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvalign.cache.buffer import KV, Part, cat
from kvalign.cache.segments import SEGMENT_LEN
from kvalign.cache.sizes import CacheSizes

RECENCY = 2.0
"""By how much a score is worth less for each e-fold of age (eval/results/memory.md)."""
GROUP = 16
"""Slots of a group at least: whole blocks."""
NUM_GROUPS = 64
"""Groups whose entries are looked at; half as many as entries are taken back, if that is more."""
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
        bounds: [B, H, S / group, D] twice, of the keys of each group: the least and the largest.
    """

    def __init__(self, like: KV, sizes: CacheSizes):
        self.sizes, block = sizes, sizes.recall_block
        self.group = -(-GROUP // block) * block
        # A segment is written before its first query looks for what its last tokens overwrite.
        most = sizes.memory + sizes.num_in_sight + SEGMENT_LEN + self.group
        self.most = -(-most // self.group) * self.group
        self.held = self.bounds = like.slots(0, 0)

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
            self._bound(row, slots)

    def _bound(self, row: int | slice, slots: Tensor) -> None:
        """Have the bounds of the groups of these slots."""
        groups = (slots // self.group).unique()
        keys = self.held.keys[row].unflatten(-2, (-1, self.group)).index_select(-3, groups)
        for bound, of_group in zip(self.bounds, keys.aminmax(dim=-2), strict=True):
            bound[row].index_copy_(-2, groups, of_group)

    @property
    def num_slots(self) -> int:
        return self.held.keys.shape[2]

    def _grow(self, num: int) -> None:
        """Have slots for so many entries, or all that there may be."""
        if self.num_slots < min(num, self.most):
            longer = min(self.most, max(num, 2 * self.num_slots, _SHORTEST))
            self._lengthen(-(-longer // self.group) * self.group)

    def _lengthen(self, num_slots: int) -> None:
        num_groups = num_slots // self.group
        self.held = self.held.map(lambda x: pad(x, (0, 0, 0, num_slots - x.shape[2])))
        self.bounds = self.bounds.map(lambda x: pad(x, (0, 0, 0, num_groups - x.shape[2])))

    def find(self, queries: Tensor, seen: Tensor, end: Sequence[int]) -> Found:
        """What scaled queries [B, H, G, T, D] ask for, of the entries that their windows have lost.

        Args:
            seen: [B, T] int64, tokens before each query.
            end: of each row, the tokens that have been written.
        """
        sizes, block = self.sizes, self.sizes.recall_block
        assert sizes.num_recalled is not None
        last = torch.tensor(end, device=seen.device)[:, None, None] - 1 - sizes.num_sinks
        queries = queries.to(self.held.keys.dtype)
        groups = self._groups(queries, seen, last)
        # 1. What is looked at: all, or of one query the entries of the best groups.
        slots = torch.arange(self.num_slots, device=seen.device).expand(len(seen), 1, 1, -1)
        keys = self.held.keys
        if groups is not None and queries.shape[3] == 1:
            slots = self._slots_of(groups)  # [B, H, 1, S']
            keys = _at(keys, slots).squeeze(2)  # [B, H, S', D]
        ages, lost = self._lost(slots, seen, last)  # [B, H or 1, T, S']
        if groups is not None and queries.shape[3] > 1:
            # Of several queries all is looked at, and what is in other groups counts for nothing.
            of_best = lost.new_zeros(*groups.shape[:3], self.num_slots)
            lost = lost & of_best.scatter(-1, self._slots_of(groups), True)
        # 2. What they are worth to the one that asks most, of queries that share a head of keys.
        scores = _products(queries, keys).amax(2)  # [B, H, T, S']
        scores = scores + torch.where(lost, _of_age(ages), -torch.inf)
        # 3. The best, or the blocks of the best, in the order of time.
        best = scores.unflatten(-1, (-1, block)).amax(-1).topk(sizes.num_recalled // block).indices
        picked = (best[..., None] * block + torch.arange(block, device=best.device)).flatten(-2)
        ages, lost, slots = (x.expand(scores.shape) for x in (ages, lost, slots))
        of_picked, order = ages.gather(-1, picked).sort(-1, descending=True)
        picked = picked.gather(-1, order)
        found, visible = slots.gather(-1, picked), lost.gather(-1, picked)
        return Found(self.held.map(lambda x: _at(x, found)), of_picked, visible)

    def _lost(self, slots: Tensor, seen: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Of slots [B, H or 1, 1, S] the ages of their tokens for each query and whether its window
        has lost them: [B, H or 1, T, S].
        """
        sizes = self.sizes
        turns = (last[..., None] - slots).div(self.num_slots, rounding_mode="floor")
        tokens = sizes.num_sinks + slots + turns * self.num_slots  # unwritten: below the sinks
        ages = seen[:, None, :, None] - tokens
        lost = (ages > sizes.num_in_sight) & (tokens >= sizes.num_sinks)
        return ages, lost & (ages <= sizes.num_in_sight + sizes.memory)

    def _groups(self, queries: Tensor, seen: Tensor, last: Tensor) -> Tensor | None:
        """The groups [B, H, T, N] that may hold what is worth the most; None where all are few, or
        a window is so short that groups which are lost in part are not yet whole.
        """
        sizes, num_groups = self.sizes, self.num_slots // self.group
        assert sizes.num_recalled is not None
        num = max(NUM_GROUPS, sizes.num_recalled // 2)
        if num_groups <= num or sizes.num_in_sight < self.group:
            return None
        firsts = torch.arange(0, self.num_slots, self.group, device=seen.device)
        firsts = firsts.expand(len(seen), 1, 1, -1)
        is_old = self._lost(firsts, seen, last)[1]
        ages, is_kept = self._lost(firsts + self.group - 1, seen, last)
        newest = ages.clamp_min(sizes.num_in_sight + 1)
        low, high = self.bounds
        bounds = _products(queries.clamp_max(0), low) + _products(queries.clamp_min(0), high)
        worth = torch.where(is_old | is_kept, _of_age(newest), -torch.inf)
        return (bounds.amax(2) + worth).topk(num).indices

    def _slots_of(self, groups: Tensor) -> Tensor:
        """All slots of groups [B, H, T, N]: [B, H, T, N * group]."""
        inside = torch.arange(self.group, device=groups.device)
        return (groups[..., None] * self.group + inside).flatten(-2)

    def rows(self, rows: slice) -> "Memory":
        """The memory of some rows, as it is now."""
        some = copy(self)
        some.held, some.bounds = self.held.rows(rows), self.bounds.rows(rows)
        return some

    def select(self, rows: Tensor) -> None:
        rows = rows.to(self.held.keys.device)
        self.held, self.bounds = self.held.rows(rows), self.bounds.rows(rows)

    def join(self, others: Sequence["Memory"]) -> None:
        for other in others:
            other._lengthen(max(x.num_slots for x in others))
        self.held = cat((x.held for x in others), dim=0)
        self.bounds = cat((x.bounds for x in others), dim=0)

    def used(self, seen: Sequence[int]) -> int:
        """Slots that hold anything once rows have seen so many tokens."""
        return max(0, min(max(seen) - self.sizes.num_sinks, self.most))


def _of_age(ages: Tensor) -> Tensor:
    """What a score is worth less."""
    return -RECENCY * ages.clamp_min(1).float().log()


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """Of queries [B, H, G, T, D] with keys [B, H, S, D]: [B, H, G, T, S] float32."""
    return (queries.flatten(2, 3) @ keys.mT).float().unflatten(2, queries.shape[2:4])


def _at(x: Tensor, slots: Tensor) -> Tensor:
    """Of x [B, H, S, D] the slots [B, H, T, R]: [B, H, T, R, D]."""
    heads = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(*x.shape[:2], 1, 1)
    found = x.flatten(0, 2).index_select(0, (heads * x.shape[2] + slots).flatten())
    return found.view(*slots.shape, x.shape[3])
