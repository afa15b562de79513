"""Pass: what a forward pass of the model adds to a cache, and what its queries see; the same for
all layers. There are three kinds:

- A step: one token of each row. It is written first, and then attention reads the slots as they
  lie.
- A chunk: many tokens that all see the same older entries, as the model's own attention does it.
- A segment: many tokens, with the same results as feeding them one by one (`segments.py`).

What a query sees is a number for each entry, its *place*. With E(t) entries evicted before token t,
the entry of token j has place j if it is a sink, and j - E(t) if that lies behind the sinks; else
the query does not see it. So a place is an entry's rank in its row.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.aligners.base import Birth, Flags
from kvalign.cache.sizes import CacheSizes
from kvalign.models.architectures import ModelSpec
from kvalign.models.attention import rows_mask

HOST = torch.device("cpu")

COUNTS = ("end", "seen", "stored", "positions", "births", "behind", "remembered")
"""Numbers of rows that differ from pass to pass, as of `Pass`; remembered: tokens that a memory has
taken in, 0 without one."""


class Sight:
    """Entries that some queries of a pass see.

    Args:
        queries: their slice of the pass.
        entries: slice of the entries after the sinks that any of them sees.
        places: [B or 1, T, S] int64, row of a table for each entry, sinks first: its place, further
            on where entries were written at later positions; negative: the query does not see it.
        has_lost: whether the window of any has lost entries.

    Attributes:
        places_of_one: [B or 1, S] int64, those of the first query.
        batch: the same queries, as a memory looks for them (`kvalign.memory.recall`).
    """

    def __init__(self, queries: slice, entries: slice, places: Tensor, has_lost: bool):
        self.queries, self.entries, self.places = queries, entries, places
        self.has_lost = has_lost
        self.places_of_one = places[:, 0]
        self.batch: Any = None
        self._mask: Tensor | None = None

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Mask [B or 1, 1, T, S], added to scores: 0 where an entry is seen, -inf elsewhere; the
        same for all layers.
        """
        if self._mask is None or self._mask.dtype != dtype:
            self._mask = (self.places >= 0)[:, None].to(dtype).log()
        return self._mask


@dataclass(eq=False)
class Pass:
    """Forward pass over `num_new` tokens of each row.

    What layers ask of a pass of one token in rows that have their sinks (`is_decode`) is a function
    of its `counts`, and nothing but tensors changes from one to the next in a full cache. So it can
    be compiled and captured.

    Attributes:
        frame: the sizes by which positions run (`Realigner.frame`).
        device: of the first layer, where the tensors for all layers are made.
        seen: tokens of each row before the pass.
        positions: position of each row's first new token.
        end: entries that the longest row has written, as `CacheSizes.slot` counts them.
        rotates: whether keys rotate.
        runs_on: whether keys keep their original positions, as of `Realigner`.
        in_order: whether attention gets entries in the order of time, right-aligned; else it gets
            slots as they lie.
        place_positions: as of `Realigner`.
        is_static: whether it has the shapes of a full cache, if it is of one token.
        counts: [7, B] int64 (`COUNTS`).
        by_kernel: whether our kernel attends for its one token.
        num_places: rows of a table that its queries may ask for.
        stored: entries of each row before the pass.
        behind: number by which each row's positions have run on.
        births: place of each row's first new token.
        is_segment: whether its tokens count as fed one by one.
        is_single: whether it has one token per row, and is no segment.
        num_lasting: tokens of each row that count.
        num_before: entries that the longest row finds.
        num_visible: entries that the longest row's last new token sees.
        size: slots that are in use after the pass; in a static one all.
        length: entries or slots that attention gets.
        grows: whether layers must have slots that were not used before.
        hides: whether some of these are not of its row.
        is_even: whether rows have equally many entries.
        is_alike: whether the entries of rows have equal positions, too.
        is_decode: whether it is of one token in rows that have entries, and all their sinks.
        position: position of the longest row's first new token.
    """

    sizes: CacheSizes
    frame: CacheSizes
    num_new: int
    device: torch.device
    seen: list[int]
    positions: list[int]
    end: int
    rotates: bool
    runs_on: bool
    in_order: bool
    place_positions: Tensor | None = None
    is_static: bool = False

    is_segment = False

    def __post_init__(self) -> None:
        sizes, num_new = self.sizes, self.num_new
        self.stored = [*map(sizes.num_stored, self.seen)]
        self.behind = [*map(self.frame.num_behind, self.seen)]
        self.births = self.stored if self.runs_on else self.positions  # there they are no places
        num_rows = len(self.seen)
        of_rows = self.seen, self.stored, self.positions, self.births, self.behind
        self.counts = torch.tensor([[self.end] * num_rows, *of_rows, [0] * num_rows])
        self.is_described = self.by_kernel = False  # the cache says so, once a layer begins
        self.num_places = (sizes if self.rotates else self.frame).last_position + 1
        self.is_single = num_new == 1 and not self.is_segment
        self.num_lasting = num_new
        self.num_before, self.position = max(self.stored), max(self.positions)
        self.num_visible = self.num_before + num_new
        most = sizes.first_input_len
        self.size = most if self.is_static else min(self.end + num_new, most)
        as_they_lie = self.is_single and not self.in_order
        self.length = self.size if as_they_lie else self.num_visible
        self.grows = self.end < most
        self.hides = min(self.stored) + num_new < self.length
        self.is_even = len(set(self.stored)) == 1
        self.is_alike = self.is_even and len(set(self.births)) == 1
        self.is_decode = self.is_single and self.end > 0 and min(self.seen) >= sizes.num_sinks
        self._sights: dict[int, list[Sight]] = {}

    def of_rows(self, name: str) -> Tensor:
        """Numbers of rows of this name (`COUNTS`), [B] int64 on the device of the first layer."""
        return self._counts[COUNTS.index(name)]

    @cached_property
    def _counts(self) -> Tensor:
        # A copy that does not wait may read the numbers after they are gone.
        return self.counts.to(self.device)

    # Tokens.

    @property
    def _numbers(self) -> Tensor:
        return torch.arange(self.num_new, device=self.device)

    @cached_property
    def model_positions(self) -> Tensor:
        """Place of each new token, which is its position but for keys that run on in a pass that is
        no segment, [B or 1, T] int64.
        """
        first = self.of_rows("positions")[:, None]
        return first if self.num_new == 1 else first + self._numbers

    @cached_property
    def position_ids(self) -> Tensor:
        """Return what the model is told of the new tokens, [B or 1, T] int64."""
        places, table = self.model_positions, self.place_positions
        return places if table is None else table.to(self.device)[places]

    def written_at(self, first: int) -> tuple[Birth, Birth]:
        """Places of the new tokens from the `first` on, and the positions of their keys, in rows
        whose places are alike.
        """
        places = slice(self.births[0] + first, self.births[0] + self.num_new)
        if len(set(self.positions)) > 1:  # one token a row: rotary positions have run on
            return places, torch.tensor(self.positions, device=self.device)[:, None, None]
        return places, slice(self.positions[0] + first, self.positions[0] + self.num_new)

    @property
    def first_place(self) -> int:
        """Row of a table for the first entry after the sinks, in rows that are alike."""
        return self.sizes.num_sinks + self.births[0] - self.stored[0]

    @cached_property
    def new_places(self) -> Tensor:
        """Place of one new token of each row, or its position where keys rotate, [B] int64."""
        return self.of_rows("positions" if self.rotates else "births")

    @cached_property
    def behind_rows(self) -> Tensor:
        """`behind`, [B, 1, 1] int64."""
        return self.of_rows("behind")[:, None, None]

    @cached_property
    def born(self) -> slice | Tensor | None:
        """Place of one new token: a slice, a tensor [1] while a static cache fills; None if those
        of rows differ.
        """
        if not self.is_alike:
            return None
        if self.is_static and self.hides:
            return self.of_rows("births")[:1]
        return slice(self.births[0], self.births[0] + 1)

    @cached_property
    def evicting(self) -> Flags:
        """Return which of the new tokens come after something was evicted."""
        least = self.sizes.first_input_len
        if not self.is_static:
            if min(self.seen) >= least:
                return True
            if max(self.seen) + self.num_new <= least:
                return False
        return self.of_rows("seen")[:, None] + self._numbers >= least

    @property
    def evicts(self) -> bool:
        """Return whether an entry is evicted before the next pass."""
        dropped = self.sizes.num_dropped
        return any(dropped(n + self.num_new) > dropped(n) for n in self.seen)

    # Slots.

    @cached_property
    def slot(self) -> Tensor:
        """Slot that one new token is written to: [1] int64, or [B, 1] in rows without their
        sinks.
        """
        if self.is_decode:
            return self._newest
        newest = self.sizes.slot(self.end)
        slots = [n if n < self.sizes.num_sinks else newest for n in self.seen]
        return torch.tensor(slots, device=self.device)[:, None]

    @cached_property
    def _newest(self) -> Tensor:
        """Slot [1] that is written next in rows that have their sinks."""
        num_sinks, sizes = self.sizes.num_sinks, self.sizes
        return (self.of_rows("end")[:1] - num_sinks) % sizes.num_window_slots + num_sinks

    @cached_property
    def read_slots(self) -> slice | Tensor | None:
        """Slots [S] or [B, S] that attention gets for one new token, in the order of time; None: as
        they lie.
        """
        if not self.in_order:
            return None
        stored = [n + 1 for n in self.stored]
        slots = order_of(self.sizes, stored, self.end + 1, self.length, self.device)
        return None if isinstance(slots, slice) and slots.start == 0 else slots

    def last_slots(self, num: int) -> slice | Tensor:
        """Slots of the newest entries before the pass (see `order_of`)."""
        return order_of(self.sizes, self.stored, self.end, num, self.device)

    def last_positions(self, num: int, num_new: int = 0) -> slice | Tensor:
        """Positions of `num` entries in the order of time, of which so many are new: a slice, or
        [B, 1, S] if those of rows differ.
        """
        if len(set(self.positions)) == 1:
            end = self.positions[0] + num_new
            return slice(end - num, end)
        ends = torch.tensor(self.positions, device=self.device)[:, None, None] + num_new
        return ends + torch.arange(-num, 0, device=self.device)

    @cached_property
    def read_positions(self) -> slice | Tensor:
        """Positions of what attention gets for one new token, [B or 1, 1, S] int64; a slice if it
        is in the order of time.
        """
        if self.in_order:
            return self.last_positions(self.length, 1)
        first = self.of_rows("positions") - self.of_rows("stored")
        return (self.places.clamp_min(0) + first[:, None])[:, None]

    # What queries see.

    @cached_property
    def places(self) -> Tensor:
        """Place among its row's entries of each that attention gets for one new token, [B, S]
        int64, or [1, S] if rows are even; negative: it is not of the row.
        """
        stored = self.of_rows("stored")[:, None]
        visible = (stored[:1] if self.is_even else stored) + self.num_new
        slots = torch.arange(self.length, device=self.device)
        if not self.is_single or self.in_order:
            return slots + visible - self.length
        num_sinks = self.sizes.num_sinks
        ages = (self._newest - slots) % max(self.size - num_sinks, 1)
        of_window = visible - 1 - ages
        if self.hides:
            of_window = of_window.masked_fill(of_window < num_sinks, -1)
        if not num_sinks:
            return of_window
        of_sinks = slots.expand_as(of_window).masked_fill(slots >= visible, -1)
        return torch.where(slots < num_sinks, of_sinks, of_window)

    @cached_property
    def visible(self) -> Tensor:
        """Return which of what attention gets are of the row, [B or 1, S] bool."""
        return self.places >= 0

    def sights(self, num_recalled: int = 0) -> list[Sight]:
        """Return what the queries of a pass see, in blocks; windows give up so many of their oldest
        entries for what a memory gives back, once they have lost any.
        """
        if num_recalled not in self._sights:
            self._sights[num_recalled] = self._make_sights(num_recalled)
        return self._sights[num_recalled]

    def _make_sights(self, num_recalled: int) -> list[Sight]:
        return [self._sight_of_all(num_recalled)]

    @cached_property
    def sight_of_one(self) -> Sight:
        """Entries that one new token of each row sees, without a memory."""
        return self.sights()[0]

    def _sight_of_all(self, num_recalled: int) -> Sight:
        """Return what one token of each row sees; or a chunk, of entries in the order of time."""
        num_sinks, places, least = self.sizes.num_sinks, self.places, self.sizes.first_input_len
        has_lost, rows = max(self.seen) >= least, places
        if self.births != self.stored:
            further = (self.of_rows("births") - self.of_rows("stored"))[:, None]
            rows = torch.where(places < num_sinks, places, places + further)
        if num_recalled and has_lost:
            gone = (places >= num_sinks) & (places < num_sinks + num_recalled)
            if min(self.seen) < least:
                gone = gone & (self.of_rows("seen") >= least)[:, None]
            rows = rows.masked_fill(gone, -1)
        rows = rows[:, None]
        if not self.is_single:
            rows = torch.where(rows > rows[..., -self.num_new :].mT, -1, rows)
        entries = slice(0, self.length - num_sinks)
        return Sight(slice(0, self.num_new), entries, rows, has_lost)

    def inputs_of(self, model: PreTrainedModel, spec: ModelSpec) -> dict[str, Any]:
        """Return the model's extra inputs: positions, and a mask over what shorter rows lack."""
        inputs: dict[str, Any] = {}
        if self.place_positions is not None or len(set(self.positions)) > 1 or not self.is_even:
            inputs["position_ids"] = self.position_ids.to(model.device)
        if not self.is_even and self.in_order:
            visible, before = self.visible.to(model.device), self.position - self.num_before
            mask: Any = rows_mask(model, spec, visible, before)
            if spec.states:  # which go by no mask: each row has its own token
                mask = dict.fromkeys(model.config.layer_types) | {"full_attention": mask}
            inputs["attention_mask"] = mask
        return inputs


def slots_of(sizes: CacheSizes, first: int, num: int, device: torch.device) -> Tensor:
    """Slots [num] of the entries after the sinks that were written `first` and next."""
    written = torch.arange(first - sizes.num_sinks, first - sizes.num_sinks + num, device=device)
    return sizes.num_sinks + written % sizes.num_window_slots


def order_of(
    sizes: CacheSizes, stored: list[int], end: int, num: int, device: torch.device
) -> slice | Tensor:
    """Slots of the newest `num` entries in the order of time, right-aligned: a slice, [num], or [B,
    num] if rows differ, of which some may be any for rows with fewer entries.

    Args:
        stored: entries of each row.
        end: entries that the longest row has written.
    """
    num_sinks, is_even = sizes.num_sinks, len(set(stored)) == 1
    if end <= sizes.first_input_len and (num <= min(stored) - num_sinks or {end} == {*stored}):
        return slice(end - num, end)
    of_ring = slots_of(sizes, end - num, num, device)
    if num <= min(stored) - num_sinks:
        return of_ring
    of_rows = torch.tensor(stored[:1] if is_even else stored, device=device)[:, None]
    places = of_rows + torch.arange(-num, 0, device=device)
    slots = torch.where(places < num_sinks, places.clamp_min(0), of_ring)
    return slots[0] if is_even else slots
