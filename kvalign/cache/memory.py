"""Memory of a window: evicted entries, stored without their position and found by queries.

    slots   0 1 2 3 4 5 6 7 | 8 9 ...      a ring: the entry of token j lies in slot
            block 0         | block 1      (j - num_sinks) mod the number of slots

Each head of keys searches for itself, and each row has its own tokens. An entry's worth is its
score with the query, reduced a little with its age. Of entries with nearly equal keys only the
newest counts. Otherwise a fact's old values would crowd out the new one.

A search scores groups of slots first, then the entries of the best groups. Each group is described
by the box around its keys. The query's product with the centre of the box and with its half-widths
estimates the group's best score. The full half-widths would give a bound (Quest, arXiv 2406.10774),
but no key lies in a corner, and half of them finds more (eval/results/memory.md).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvalign.cache.buffer import KV, Part, cat
from kvalign.cache.form import form_of
from kvalign.cache.recall import COMPARED, Asking, Found, Lost
from kvalign.cache.search import alike_newer, at, products
from kvalign.cache.segments import SEGMENT_LEN
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.lasting import lasting
from kvalign.models import kernel

GROUP = 32
"""Slots of a group."""
NUM_GROUPS = 64
"""Groups whose entries are looked at; a quarter as many as entries are taken back, if that is
more. With half as many single facts are missed."""
REACH = 0.5
"""How much of the reach of a group's box counts."""
ALIKE = 0.95
"""Cosine from which two keys say the same, once what all of those compared share is taken off."""
FEW = 4
"""Times as many entries as groups have, up to which many queries are multiplied with all."""
READ_AT_ONCE = 2**22
"""Numbers that several queries read or make together."""
_SHORTEST = 256


class Memory(Part):
    """Entries of one layer after the sinks: those in the window, and as many evicted ones as
    `sizes.memory` says. Beyond that the oldest are lost.

    Args:
        like: entries of the shape [B, H, ?, D], on the device of those to store.
        sizes: of the cache.
        grows: whether slots are allocated as they are needed; else all at once, for a compiled
            step.

    Attributes:
        form: of the stored entries.
        held: [B, H, S, width of the form]; S doubles until all slots are there.
        boxes: [B, H, S / group, 2 D], for each whole group the centre of its keys and their reach
            from there.
        alike: cosine of two keys from which the older entry is not taken back.
        has_kernel: whether the kernel of `kvalign.models.kernel` searches.
    """

    def __init__(self, like: KV, sizes: CacheSizes, grows: bool = True):
        self.sizes, self.grows, self.group, self.alike = sizes, grows, GROUP, ALIKE
        # A segment is written before its first query looks for what its last tokens overwrite, and
        # a group is overwritten as a whole.
        most = sizes.memory + sizes.num_in_sight + SEGMENT_LEN + self.group
        self.most = -(-most // self.group) * self.group
        self.form = form_of(sizes, like.keys.dtype)
        self.held = like.map(lambda x: self.form.empty(x, 0))
        self.boxes = torch.cat([like.keys[:, :, :0]] * 2, -1)
        is_fit = like.keys.device.type == "cpu" and like.keys.dtype == torch.float32
        self.has_kernel = is_fit and like.keys.shape[3] in kernel.DIMS and kernel.is_here()

    def write(self, seen: Sequence[int], new: KV) -> None:
        """Write the entries [B, H, T, D] of the tokens from each row's `seen` on, without sinks."""
        self.put(seen, new.map(self.form.stored))

    def put(self, seen: Sequence[int], new: KV) -> None:
        """Same for entries as they are stored."""
        num_new = new.keys.shape[2]
        self._grow(max(seen) + num_new - self.sizes.num_sinks)
        alike = len(set(seen)) == 1
        for row, start in [(slice(None), seen[0])] if alike else enumerate(seen):
            rows = row if isinstance(row, slice) else slice(row, row + 1)
            self._write_rows(rows, start, new.rows(rows))

    def _write_rows(self, rows: slice, start: int, new: KV) -> None:
        num_new = new.keys.shape[2]
        first = min(max(self.sizes.num_sinks - start, num_new - self.most, 0), num_new)
        while first < num_new:
            slot = (start + first - self.sizes.num_sinks) % self.num_slots
            num = min(num_new - first, self.num_slots - slot)
            for held, x in zip(self.held, new.slots(first, num), strict=True):
                held[rows, :, slot : slot + num] = x.detach()
            self._sum_up(rows, slot // self.group, (slot + num) // self.group)
            first += num

    def _sum_up(self, rows: slice, first: int, end: int) -> None:
        """Have the boxes of the groups from `first` to before `end`."""
        if first < end:
            keys = self.form.read(self.held.keys[rows, :, first * self.group : end * self.group])
            least, most = keys.unflatten(2, (-1, self.group)).aminmax(dim=3)
            box = torch.cat([least + most, REACH * (most - least)], -1) / 2
            self.boxes[rows, :, first:end] = box

    @property
    def num_slots(self) -> int:
        return self.held.keys.shape[2]

    def _grow(self, num: int) -> None:
        """Have slots for so many entries, or all that there may be."""
        if self.num_slots < min(num, self.most):
            num = max(num, 2 * self.num_slots, _SHORTEST) if self.grows else self.most
            self._lengthen(-(-min(num, self.most) // self.group) * self.group)

    @lasting()
    def _lengthen(self, num_slots: int) -> None:
        self.held = self.held.map(lambda x: pad(x, (0, 0, 0, num_slots - x.shape[2])))
        num_more = num_slots // self.group - self.boxes.shape[2]
        self.boxes = pad(self.boxes, (0, 0, 0, num_more))

    def prepare(self, asking: Asking) -> Lost:
        """Return what a search for these queries needs; a compiled step calls it beforehand."""
        lost = asking.lost(self.num_slots, self.group, self.held.keys.device)
        if not self.has_kernel:
            _ = lost.of_groups, lost.newer  # and worth
        return lost

    def find(self, queries: Tensor, asking: Asking) -> Found:
        """Return the evicted entries that match scaled queries [B, H, G, T, D]."""
        lost = self.prepare(asking)
        queries = queries.to(self.form.dtype)
        if self.has_kernel:
            return self._find_by_kernel(queries, lost)
        groups = self._groups(queries, lost)
        # To multiply many queries with all keys takes less than to gather those of each one's
        # groups, unless there are many more.
        num_read = self.num_slots if groups is None else groups.shape[-1] * self.group
        reads_all = self.num_slots <= (FEW if queries.shape[3] > 1 else 1) * num_read
        num_made = queries.shape[2] * self.num_slots if reads_all else queries.shape[-1] * num_read
        num = max(1, READ_AT_ONCE // (len(queries) * queries.shape[1] * num_made))
        spans = [slice(i, i + num) for i in range(0, queries.shape[3], num)]
        parts = [self._find(queries, groups, lost, span, reads_all) for span in spans]
        slots, ages, visible = parts[0]
        if len(parts) > 1:
            slots, ages, visible = (torch.cat(x, 2) for x in zip(*parts, strict=True))
        return Found(self.held.map(lambda x: self.form.read(at(x, slots))), ages, visible)

    def _find_by_kernel(self, queries: Tensor, lost: Lost) -> Found:
        num = self.sizes.num_recalled
        assert num is not None
        of_ages = lost.worths, lost.newest, lost.since, lost.oldest
        found = kernel.find(
            (queries, *self.held, self.boxes, *of_ages),
            self.sizes.num_in_sight,
            self._num_groups or self.num_slots // self.group,
            COMPARED * num,
            num,
            self.alike,
        )
        return Found(KV(*found[:2]), *found[2:])

    def _worth(
        self, queries: Tensor, groups: Tensor | None, lost: Lost, span: slice, reads_all: bool
    ) -> Tensor:
        """The worth [B, H, T, S'] of all entries, or of those of groups [B, H, T, N]."""
        queries = queries[:, :, :, span]
        if reads_all:
            scores = products(queries, self.form.read(self.held.keys)).amax(2)
        if groups is None:
            return scores + lost.worth[:, :, span]
        groups = groups[:, :, span]
        if reads_all:
            of_groups = groups[..., None].expand(*groups.shape, self.group)
            scores = scores.unflatten(-1, (-1, self.group)).gather(3, of_groups).flatten(3)
        else:
            keys = at(self.held.keys.unflatten(2, (-1, self.group)).flatten(3), groups)
            keys = keys.view(*groups.shape[:3], -1, self.held.keys.shape[3])
            keys = self.form.read(keys)  # [B, H, T, S', D]
            scores = (queries.transpose(2, 3) @ keys.mT).float().amax(3)
        return scores + lost.worth_in(groups, span)

    def _find(
        self, queries: Tensor, groups: Tensor | None, lost: Lost, span: slice, reads_all: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The slots [B, H, T, R] of what some of the queries take back, of groups or of all, in the
        order of time; its age, and whether it is visible.
        """
        scores = self._worth(queries, groups, lost, span, reads_all)
        num = self.sizes.num_recalled
        assert num is not None
        best = scores.topk(min(COMPARED * num, scores.shape[-1]), sorted=False)
        slots, worth = best.indices, best.values
        if groups is not None:
            group = groups[:, :, span].gather(-1, slots // self.group)
            slots = group * self.group + slots % self.group
        ages, order = lost.ages(slots, span).sort(-1, descending=True)
        slots, worth = slots.gather(-1, order), worth.gather(-1, order)
        is_lost = None if lost.are_many else worth > -torch.inf
        keys = self.form.read(at(self.held.keys, slots))
        superseded = alike_newer(keys, lost.newer, is_lost) > self.alike
        best = worth.masked_fill(superseded, -torch.inf).topk(num, sorted=False)
        # What is not visible lies in front of the oldest: it moves none of the others.
        num_compared = slots.shape[-1]
        order = (best.indices + num_compared * (best.values > -torch.inf)).sort().values
        kept = order % num_compared
        return slots.gather(-1, kept), ages.gather(-1, kept), order >= num_compared

    @property
    def _num_groups(self) -> int | None:
        """Number of groups to search; None: all, if they are few, or the window is so short that
        partly evicted groups are not yet complete.
        """
        assert self.sizes.num_recalled is not None
        num = max(NUM_GROUPS, self.sizes.num_recalled // 4)
        are_few = self.num_slots // self.group <= num or self.sizes.num_in_sight < self.group
        return None if are_few else num

    def _groups(self, queries: Tensor, lost: Lost) -> Tensor | None:
        """The groups [B, H, T, N] to look at; None: all."""
        num = self._num_groups
        if num is None:
            return None
        both = torch.cat([queries, queries.abs()], -1)
        worth = products(both, self.boxes).amax(2) + lost.of_groups
        return worth.topk(num, sorted=False).indices

    @lasting()
    def select(self, rows: Tensor) -> None:
        rows = rows.to(self.held.keys.device)
        self.held, self.boxes = self.held.rows(rows), self.boxes[rows]

    @lasting()
    def join(self, others: Sequence["Memory"]) -> None:
        for other in others:
            other._lengthen(max(x.num_slots for x in others))
        self.held = cat((x.held for x in others), dim=0)
        self.boxes = torch.cat([x.boxes for x in others])

    def used(self, seen: Sequence[int]) -> int:
        """Slots in use once rows have been fed so many tokens."""
        return max(0, min(max(seen) - self.sizes.num_sinks, self.most))
