"""Memory of a window: evicted entries, stored without their position and found by queries.

It lies beside the model on a GPU that has room for it, else in the host's memory. There queries go
to it, and the few entries that they take back return, so it may be larger than a GPU's memory.

The slots are a ring: the entry of token j lies in slot (j - num_sinks) mod the number of slots.

Each head of keys searches for itself, and each row has its own tokens. An entry's worth is its
score with the query, reduced a little with its age. Of entries with nearly equal keys only the
newest counts. Otherwise a fact's old values would crowd out the new one.

Our kernel reads a sketch of the keys (`kvalign.memory.sketch`): blocks of entries that are alike,
by their means, the entries of the best of these and of all young ones in 2 bits, those of the best
of these in 4; and it computes the exact scores of the best of these. Tokens that come together read
young entries once for all of them, exactly. Without the kernel all scores are exact.
"""

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvalign.aligners.entries import KV, cat
from kvalign.cache.attention import Recalled
from kvalign.cache.layer import Form
from kvalign.cache.passes import HOST
from kvalign.cache.segments import PART_LEN
from kvalign.cache.sizes import CacheSizes
from kvalign.memory.recall import EvictedSlots, Matches, QueryBatch
from kvalign.memory.recall_places import RecallPlaces
from kvalign.memory.sketch import BLOCK, PAGE, Sketch
from kvalign.memory.slots import is_on_disk, lengthened
from kvalign.models import kernel
from kvalign.models.rope import Angles
from kvalign.models.wrapped import no_autograd_modes

TOGETHER = 32
"""Tokens fed one by one that are put aside at once."""
NUM_ESTIMATED = 512
"""Entries whose scores the kernel estimates by 4 bits: up to twice as many of many, 16 times as
many as are taken back, if that is more, or a quarter of those that are lost, if that is less."""
NUM_SCORED = 96
"""Entries whose exact scores it computes; one and a half times as many as are compared, if that is
more."""
FEWEST_BLOCKS, MOST_BLOCKS = 256, 512
"""Blocks of alike entries that it reads of the pages in order: a quarter, within these bounds."""
READ_AT_ONCE = 2**22
"""Scores that several queries make together."""
_SHORTEST = 256
_UNKNOWN = 0  # digest of a slot that was written since


class Memory:
    """Entries of one layer after the sinks: those in the window, and as many evicted ones as
    `sizes.memory` says. Beyond that the oldest are lost.

    Args:
        like: entries of the shape [B, H, ?, D].
        form: of the stored entries.
        places: of what is taken back.
        device: where it lies.
        is_searched: whether queries look for its entries; else they wait for edits.
        patience: tokens for which a page waits, when it is due, until it is put in order.
        grows: whether slots are allocated as they are needed; else all at once, for a compiled
            step or on a GPU.

    Attributes:
        alike: cosine of two keys from which the older entry is not taken back.
        seen: number of tokens of each row that it has taken in, sinks included.
        entries: [B, H, S, width of the form]; S doubles until all slots are there.
        base: [B, H, 1, D] float32, the mean of the keys that each row wrote first; 0 before.
        sketch: the keys in few bits, where the kernel searches; else None.
    """

    def __init__(
        self,
        like: KV,
        form: Form,
        places: RecallPlaces,
        device: torch.device = HOST,
        is_searched: bool = True,
        patience: int = 0,
        grows: bool = True,
    ):
        self.form, self.places, self.device = form, places, device
        self.is_searched, self.patience, self.grows = is_searched, patience, grows
        self.sizes, self.alike = places.sizes, places.alike
        # A part of a segment is written before its first query looks for what its last overwrites.
        self.most = most_slots(self.sizes)
        like = like.map(lambda x: x[:, :, :0].to(device))
        self.seen = [0] * len(like.keys)
        self.entries, self._are_on_disk = like.map(lambda x: self.form.empty(x, 0)), False
        with no_autograd_modes():
            self._digests = torch.zeros(len(like.keys), 0, dtype=torch.int64, device=device)
            self.base = like.keys.new_zeros(*like.keys.shape[:2], 1, like.keys.shape[3]).float()
        self.sketch = self._new_sketch()

    def _new_sketch(self) -> Sketch | None:
        """An empty sketch, if our kernel can search here."""
        is_fit = self.device == HOST and self.base.shape[3] in kernel.DIMS
        if not (self.is_searched and is_fit and kernel.is_here()):
            return None
        return Sketch(self.base)

    def write(self, seen: Sequence[int], new: KV) -> None:
        """Write the entries [B, H, T, D] of the tokens from each row's `seen` on, without sinks."""
        self.put(seen, self.form.encode_at(new, slice(0)))

    def put(self, seen: Sequence[int], new: KV) -> None:
        """Same for entries as they are stored."""
        self._put(seen, new, [n + new.keys.shape[2] for n in seen])

    def restore(self, stored: KV, base: Tensor, seen: list[int]) -> None:
        """Have these stored entries [B, H, T, width of the form] in the first slots, and a base
        [B, H, 1, D], after so many tokens of each row.
        """
        self.base = base
        self._put([self.sizes.num_sinks] * len(seen), stored, seen)

    def _put(self, seen: Sequence[int], new: KV, seen_after: list[int]) -> None:
        new, num_new = new.map(lambda x: x.detach().to(self.device)), new.keys.shape[2]
        self._grow(max(seen) + num_new - self.sizes.num_sinks)
        for rows, start in self._rows_of(seen):
            self._write_rows(rows, start, new.rows(rows))
        self.seen = seen_after
        if self.sketch is not None:
            for rows, num in self._rows_of(seen_after):
                self._order(self.sketch, rows, num - self.sizes.num_sinks)

    def _rows_of(self, seen: Sequence[int]) -> list[tuple[slice, int]]:
        """Rows with the tokens of each; all together, if these are alike."""
        if len(set(seen)) == 1:
            return [(slice(None), seen[0])]
        return [(slice(row, row + 1), n) for row, n in enumerate(seen)]

    def _write_rows(self, rows: slice, start: int, new: KV) -> None:
        num_new = new.keys.shape[2]
        first = min(max(self.sizes.num_sinks - start, num_new - self.most, 0), num_new)
        while first < num_new:
            slot = (start + first - self.sizes.num_sinks) % self.num_slots
            num = min(num_new - first, self.num_slots - slot)
            for own, x in zip(self.entries, new.slots(first, num), strict=True):
                own[rows, :, slot : slot + num] = x
            self._digests[rows, slot : slot + num] = _UNKNOWN
            keys = self.form.decode(new.keys[:, :, first : first + num]).float()
            if not self.base[rows].any():
                self.base[rows] = keys.mean(2, keepdim=True).nan_to_num(0, 0, 0)
            if self.sketch is not None:
                self._write_sketch(self.sketch, rows, slot, keys - self.base[rows])
            first += num

    def _write_sketch(self, sketch: Sketch, rows: slice, slot: int, apart: Tensor) -> None:
        """Write keys less their base into a sketch, of the slots from this one on."""
        last = slot + apart.shape[2]
        if slot % PAGE and sketch.is_in_order(rows, slot // PAGE):
            slot = slot // PAGE * PAGE
            apart = self._apart(rows, slot, last)
        if last % PAGE and sketch.is_in_order(rows, last // PAGE):
            apart = self._apart(rows, slot, last - last % PAGE + PAGE)
        sketch.write(rows, slot, apart)

    def _order(self, sketch: Sketch, rows: slice, num: int) -> None:
        """Put the pages in order that are due after so many tokens without sinks: so long after the
        window has left them that their entries' ages weigh about as much.
        """
        for page in sketch.not_in_order(rows):
            first, last = page * PAGE, (page + 1) * PAGE - 1
            age = (num - 1 - last) % self.num_slots
            is_in_turn = (num - 1 - first) % self.num_slots - age == PAGE - 1
            due = self.sizes.num_in_sight + PAGE + self.patience
            if last < num and age >= due and is_in_turn:
                sketch.order(rows, page, self._apart(rows, first, last + 1))

    def _apart(self, rows: slice, first: int, last: int) -> Tensor:
        """Keys of these slots less their base, [B, H, T, D] float32."""
        return self.form.decode(self.entries.keys[rows, :, first:last]).float() - self.base[rows]

    def written(self, first: int, num: int) -> KV:
        """Entries of the tokens from `first` on, as they are stored."""
        slots = torch.arange(first, first + num, device=self.device) - self.sizes.num_sinks
        slots = slots % self.num_slots
        return self.entries.at(slots)

    def digests(self) -> Tensor:
        """Return digests [B, S] int64 of the bytes of each slot in use, over all heads; computed
        once they are asked for.
        """
        digests = self._digests[:, : self.num_used]
        for slots in (digests == _UNKNOWN).any(0).nonzero()[:, 0].split(PAGE):
            digests[:, slots] = _digests(self.entries.at(slots))
        return digests

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        sketch = () if self.sketch is None else self.sketch.tensors
        return sum(x.nbytes for x in (*self.entries, *sketch))

    @property
    def num_slots(self) -> int:
        return self.entries.keys.shape[2]

    def _grow(self, num: int) -> None:
        """Have slots for so many entries, or all that there may be."""
        if self.num_slots < min(num, self.most):
            num = max(1 << (num - 1).bit_length(), _SHORTEST) if self.grows else self.most
            self._lengthen(_whole(min(num, self.most)))

    @no_autograd_modes()
    def _lengthen(self, num_slots: int) -> None:
        self.entries = self.entries.map(lambda x: lengthened(x, 2, num_slots))
        self._are_on_disk = is_on_disk(self.entries.keys)  # which a compiled step cannot ask
        self._digests = lengthened(self._digests, 1, num_slots)
        if self.sketch is not None:
            self.sketch.lengthen(num_slots)

    def prepare(self, batch: QueryBatch) -> EvictedSlots:
        """Return what a search for these queries needs; a compiled step calls it beforehand."""
        evicted_slots = batch.evicted_slots(self.num_slots, self.device)
        if self.sketch is None:
            _ = evicted_slots.worth, evicted_slots.newer
        else:
            _ = evicted_slots.worths
        return evicted_slots

    def find(self, queries: Tensor, batch: QueryBatch) -> Matches:
        """Return the evicted entries that match scaled queries [B, H, G, T, D], rotated as
        `Recall.rotate_queries` does, on their device.
        """
        base = None if self.form.base is None else self.form.base.to(self.device)
        if self.sketch is not None:
            found = self._search(self.sketch, queries, self.prepare(batch))
            matches = Matches(KV(*found[:2]), *found[2:])
        else:
            matches = self._find_by_torch(queries, self.prepare(batch), base)
        if base is not None:
            entries = matches.entries
            matches = matches._replace(entries=KV(entries.keys + base[:, None], entries.values))
        return matches.to(queries.device, self.form.dtype)

    def see(self, queries: Tensor, batch: QueryBatch, placing: kernel.Placing) -> Recalled:
        """Return what scaled queries [B, H, G, T, D], which are not rotated yet, see of what they
        find, where there is a sketch.
        """
        assert self.sketch is not None
        slots = self.prepare(batch)
        found = self._search(self.sketch, queries, slots, slots.angles, placing)
        return Recalled(*(x.to(queries.device) for x in found))

    def _find_by_torch(
        self, queries: Tensor, evicted_slots: EvictedSlots, base: Tensor | None
    ) -> Matches:
        queries = queries.detach().to(self.device)  # which entries are found has no slope
        if base is None:
            added = queries.new_zeros(queries.shape[:4], dtype=torch.float32)
        else:  # of queries that share a head of keys each has its own product
            added = (queries.float() @ base[:, None].mT)[..., 0]
        queries = queries.to(self.form.dtype)
        num = max(1, READ_AT_ONCE // (queries.shape[:3].numel() * self.num_slots))
        spans = [slice(i, i + num) for i in range(0, queries.shape[3], num)]
        parts = [
            self._find(queries[:, :, :, span], added[:, :, :, span], evicted_slots, span)
            for span in spans
        ]
        slots, ages, visible = (torch.cat(x, 2) for x in zip(*parts, strict=True))
        return Matches(self.entries.map(lambda x: self.form.decode(at(x, slots))), ages, visible)

    def _search(
        self,
        sketch: Sketch,
        queries: Tensor,
        slots: EvictedSlots,
        angles: Angles | None = None,
        placing: kernel.Placing | None = None,
    ) -> list[Tensor]:
        num, bases = self.sizes.num_recalled, self.form.bases
        assert num is not None
        queries = queries.detach().float().to(self.device).contiguous()
        of_sketch = self.base, sketch.turn, *sketch.tensors
        of_ages = slots.worths, slots.newest, slots.since, slots.oldest
        return kernel.find(
            (queries, *self.entries, *of_sketch, *of_ages),
            self.sizes.num_in_sight,
            min(max(FEWEST_BLOCKS, self.num_slots // BLOCK // 4), MOST_BLOCKS),
            max(min(max(NUM_ESTIMATED, self.num_slots // 32), 2 * NUM_ESTIMATED), 16 * num),
            max(NUM_SCORED, 3 * self.places.num_compared // 2),
            self.places.num_compared,
            num,
            self.alike,
            key_bases=None if bases is None else bases.to(self.device),
            angles=angles,
            placing=placing,
            are_on_disk=self._are_on_disk,
        )

    def _find(
        self, queries: Tensor, added: Tensor, evicted_slots: EvictedSlots, span: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The slots [B, H, T, R] of what some of the queries take back, in the order of time; its
        age, and whether it is visible.
        """
        scores = (products(queries, self.form.decode(self.entries.keys)) + added[..., None]).amax(
            2
        ) + evicted_slots.worth[:, :, span]
        num = self.sizes.num_recalled
        assert num is not None
        best = scores.topk(min(self.places.num_compared, scores.shape[-1]), sorted=False)
        slots, worth = best.indices, best.values
        ages, order = evicted_slots.ages(slots, span).sort(-1, descending=True)
        slots, worth = slots.gather(-1, order), worth.gather(-1, order)
        is_lost = None if evicted_slots.are_many else worth > -torch.inf
        keys = self.form.decode(at(self.entries.keys, slots))
        superseded = alike_newer(keys, evicted_slots.newer, is_lost) > self.alike
        best = worth.masked_fill(superseded, -torch.inf).topk(num, sorted=False)
        # What is not visible lies in front of the oldest: it moves none of the others.
        num_compared = slots.shape[-1]
        order = (best.indices + num_compared * (best.values > -torch.inf)).sort().values
        index = order % num_compared
        return slots.gather(-1, index), ages.gather(-1, index), order >= num_compared

    @no_autograd_modes()
    def select(self, rows: Tensor) -> None:
        """Keep these rows [B'], in this order."""
        self.seen = [self.seen[row] for row in rows.tolist()]
        rows = rows.to(self.device)
        self.entries, self.base = self.entries.rows(rows), self.base[rows]
        self._are_on_disk = False
        self._digests = self._digests[rows]
        if self.sketch is not None:
            self.sketch.select(rows)

    @classmethod
    @no_autograd_modes()
    def joined(cls, memories: Sequence[Self]) -> Self:
        """Memory of the rows of all these; on the host, unless all lie on one device."""
        if len({one.device for one in memories}) > 1:
            for one in memories:
                one._to_host()
        for one in memories:
            one._lengthen(max(x.num_slots for x in memories))
        joined = copy.copy(memories[0])
        joined.seen = [n for one in memories for n in one.seen]
        joined.entries = cat((one.entries for one in memories), dim=0)
        joined._are_on_disk = False
        joined.base = torch.cat([one.base for one in memories])
        joined._digests = torch.cat([one._digests for one in memories])
        if joined.sketch is not None:
            joined.sketch = Sketch.joined([x.sketch for x in memories if x.sketch is not None])
        return joined

    def _to_host(self) -> None:
        if self.device == HOST:
            return
        self.device = HOST
        self.entries = self.entries.map(lambda x: x.to(HOST))
        self.base, self._digests = self.base.to(HOST), self._digests.to(HOST)
        self.sketch = self._new_sketch()
        if self.sketch is not None:
            self.sketch.lengthen(self.num_slots)
            self.sketch.write(slice(None), 0, self._apart(slice(None), 0, self.num_slots))

    def num_used_after(self, seen: Sequence[int]) -> int:
        """Slots in use once rows have been fed so many tokens."""
        return max(0, min(max(seen) - self.sizes.num_sinks, self.most))

    @property
    def num_used(self) -> int:
        """Slots in use."""
        return self.num_used_after(self.seen)


def _digests(stored: KV) -> Tensor:
    """Digests [B, T] int64 of stored entries: of each the sum of its bytes times random numbers."""
    keys, values = (x.transpose(1, 2).flatten(2).contiguous() for x in stored)
    both = torch.cat([keys, values], 2).view(torch.uint8)
    kind = torch.uint8 if both.shape[2] % 4 else torch.int32
    numbers = both.view(kind)
    factors = _factors(numbers.shape[2], numbers.device)
    # CUDA has no product of matrices of whole numbers.
    return (numbers * factors).sum(2) if numbers.is_cuda else numbers.long() @ factors


@lru_cache(maxsize=4)
@no_autograd_modes()
def _factors(num: int, device: torch.device) -> Tensor:
    """Random odd numbers [num] int64, the same in every process."""
    rng = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**63), 2**63 - 1, (num,), generator=rng) | 1).to(device)


def most_slots(sizes: CacheSizes) -> int:
    """Slots of a memory that is full."""
    return _whole(sizes.memory + sizes.num_in_sight + PART_LEN)


def _whole(num: int) -> int:
    """Slots of whole blocks of a sketch, at least so many."""
    return -(-num // BLOCK) * BLOCK


def products(queries: Tensor, keys: Tensor) -> Tensor:
    """Return products of queries [B, H, G, T, D] with keys [B, H, S, D]: [B, H, G, T, S]
    float32.
    """
    return (queries.flatten(2, 3) @ keys.mT).float().unflatten(2, queries.shape[2:4])


def alike_newer(keys: Tensor, newer: Tensor, is_lost: Tensor | None) -> Tensor:
    """Return for keys [..., M, D], in the order of time, the cosine of each with the newer one that
    is most like it: [..., M].

    Args:
        newer: as of `EvictedSlots`.
        is_lost: [..., M] bool, those that are compared; None: all.
    """
    if is_lost is None:
        apart = keys - keys.mean(-2, keepdim=True)
    else:
        keys = keys * is_lost[..., None]
        apart = keys - keys.sum(-2, keepdim=True) / is_lost.sum(-1)[..., None, None].clamp_min(1)
    apart = normalize(apart, dim=-1).flatten(0, -3)  # [N, M, D]
    alike = torch.baddbmm(newer.to(keys.dtype), apart, apart.mT).unflatten(0, keys.shape[:-2])
    if is_lost is not None:
        alike = alike.masked_fill(~is_lost[..., None, :], -torch.inf)
    return alike.amax(-1)


def at(x: Tensor, slots: Tensor) -> Tensor:
    """Return the slots [B, H, T, R] of x [B, H, S, D]: [B, H, T, R, D]."""
    num_rows, num_heads, num_slots, head_dim = x.shape
    firsts = torch.arange(0, num_rows * num_heads * num_slots, num_slots, device=x.device)
    rows = (slots.flatten(0, 1).flatten(1) + firsts[:, None]).flatten()
    return x.view(-1, head_dim).index_select(0, rows).view(*slots.shape, head_dim)
