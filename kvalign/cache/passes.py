"""Forward pass: what it adds to a cache, and where; the same for all layers."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.aligners.base import Flags
from kvalign.cache.attention import Segment
from kvalign.cache.sizes import CacheSizes
from kvalign.models.architectures import ModelSpec
from kvalign.models.attention import rows_mask

HOST = torch.device("cpu")


class InSight(Protocol):
    """Entries that one query of each row sees, for our kernel (`kvalign.cache.int8`)."""

    def attend(
        self, form: Any, query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        """Attention of queries [B, H, 1, D] over slots of this `Form`: [B, 1, H, D]."""


@dataclass(frozen=True)
class DecodeStep:
    """Usual pass: one token in rows that have their sinks. It is a function of the pass's `counts`,
    and nothing but tensors changes from one to the next in a full cache. So its layers do the same
    in every step, and it can be compiled and captured.

    Attributes:
        slot: [1] int64, the slot that it writes.
        read: slots that attention gets, in the order of time; None: as they lie.
        position_ids: [B, 1] int64, its position.
        at: [B, 1, 1] int64, the same in another shape.
        behind: [B, 1, 1] int64, `Step.behind_rows`.
        birth: the token's place, a tensor [1] while a static cache fills; None if those of rows
            differ.
        evicting: as of `Step.evicting`.
        places: as of `Step.places`; None if attention does not ask for them.
        order: [W] int64, `Step.window_order`; None if attention does not ask for it.
        all_at: positions of what attention gets, as of `Step.at_places`; None if keys are not bare.
        reading: what the realigner needs in all layers, as its `describe` says.
        in_sight: these entries for our kernel, where it reads them as they are stored.
    """

    slot: Tensor
    read: slice | Tensor | None
    position_ids: Tensor
    at: Tensor
    behind: Tensor
    birth: slice | Tensor | None
    evicting: Flags
    places: Tensor | None
    order: Tensor | None
    all_at: slice | Tensor | None
    reading: Any
    in_sight: InSight | None


class Counts(NamedTuple):
    """Numbers of rows, [B] int64 each, as of `Step`."""

    end: Tensor
    seen: Tensor
    stored: Tensor
    positions: Tensor
    births: Tensor
    behind: Tensor
    aside: Tensor  # tokens that a memory has taken in, 0 without one


@dataclass(eq=False)
class Step:
    """Forward pass over `num_new` tokens of each row.

    Attributes:
        device: of the first layer, where the tensors for all layers are made.
        seen: tokens of each row before the pass.
        stored: entries of each row before the pass.
        behind: number by which each row's positions have run on.
        positions: position of each row's first new token.
        births: place of each row's first new token.
        end: entries that the longest row has written, as `CacheSizes.slot` counts them.
        in_order: whether attention gets entries in the order of time, right-aligned; else it gets
            slots as they lie.
        place_positions: as of `Realigner`.
        counts: [7, B] int64, the numbers of rows that change from pass to pass (`Counts`).
        is_static: whether it has the shapes of a full cache, if it is of one token.
        segment: positions of each token, if the tokens count as fed one by one.
        decode: description of the usual pass, once a layer asks for it.
        is_single: whether it has one token per row, and no segment.
        num_lasting: tokens of each row that count; the others are guesses.
        num_before: entries that the longest row finds.
        num_visible: entries that the longest row's last new token sees.
        size: slots that are in use after the pass; in a static one all.
        length: entries or slots that attention gets.
        hides: whether some of these are not of its row.
        is_even: whether rows have equally many entries.
        is_alike: whether the entries of rows have equal positions, too.
        is_decode: whether it can be the usual pass: one token in rows that have their sinks.
        position: position of the longest row's first new token.
    """

    sizes: CacheSizes
    num_new: int
    device: torch.device
    seen: list[int]
    stored: list[int]
    behind: list[int]
    positions: list[int]
    births: list[int]
    end: int
    in_order: bool
    counts: Tensor
    place_positions: Tensor | None = None
    is_static: bool = False
    segment: Segment | None = None
    decode: DecodeStep | None = None

    def __post_init__(self) -> None:
        sizes, num_new = self.sizes, self.num_new
        self.is_single = num_new == 1 and self.segment is None
        self.num_lasting = num_new - (self.segment.num_ahead if self.segment else 0)
        self.num_before, self.position = max(self.stored), max(self.positions)
        self.num_visible = self.num_before + num_new
        most = sizes.first_input_len
        self.size = most if self.is_static else min(self.end + num_new, most)
        as_they_lie = self.is_single and not self.in_order
        self.length = self.size if as_they_lie else self.num_visible
        self.hides = min(self.stored) + num_new < self.length
        self.is_even = len(set(self.stored)) == 1
        self.is_alike = self.is_even and len(set(self.births)) == 1
        self.is_decode = self.is_single and min(self.seen) >= sizes.num_sinks

    @cached_property
    def count(self) -> Counts:
        """`counts`, on the device of the first layer."""
        # A copy that does not wait may read the numbers after they are gone.
        return Counts(*self.counts.to(self.device).unbind())

    @property
    def behind_rows(self) -> Tensor:
        """`behind`, [B, 1, 1] int64."""
        return self.count.behind[:, None, None] if self.decode is None else self.decode.behind

    @property
    def first_place(self) -> int:
        """Position of the first entry after the sinks, in rows that are alike."""
        return self.sizes.num_sinks + self.births[0] - self.stored[0]

    @property
    def places(self) -> Tensor:
        """Place among its row's entries of each that attention gets for one new token, [B, S]
        int64, or [1, S] if rows are even; negative: it is not of the row.
        """
        if self.decode is not None and self.decode.places is not None:
            return self.decode.places
        stored = self.count.stored[:, None]
        visible = (stored[:1] if self.is_even else stored) + self.num_new
        slots = torch.arange(self.length, device=self.device)
        if not self.is_single or self.in_order:
            return slots + visible - self.length
        num_sinks = self.sizes.num_sinks
        ages = (self._slot - slots) % max(self.size - num_sinks, 1)
        of_window = visible - 1 - ages
        of_window = of_window.masked_fill(of_window < num_sinks, -1)
        of_sinks = slots.expand_as(of_window).masked_fill(slots >= visible, -1)
        return torch.where(slots < num_sinks, of_sinks, of_window)

    @property
    def rows(self) -> Tensor:
        """Row of a table for each slot that attention gets, [B or 1, S] int64: its place, further
        on where entries were written at later positions; negative: it is not of the row.
        """
        places = self.places
        if self.births == self.stored:
            return places
        further = (self.count.births - self.count.stored)[:, None]
        return torch.where(places < self.sizes.num_sinks, places, places + further)

    @property
    def window_order(self) -> Tensor:
        """Number among the slots after the sinks of the i-th oldest entry there, in even rows, [W]
        int64; in a static pass those of the slots without one behind them.
        """
        num_sinks = self.sizes.num_sinks
        num = max(self.stored[0] + 1 - num_sinks, 0)
        if self.in_order:
            return torch.arange(num, device=self.device)
        first = self.count.end[:1] - self.count.stored[:1]  # after the sinks
        num = self.size - num_sinks if self.is_static else num
        return (first + torch.arange(num, device=self.device)) % self.sizes.num_window_slots

    @property
    def visible(self) -> Tensor:
        """Return which of what attention gets are of the row, [B or 1, S] bool."""
        return self.places >= 0

    @property
    def _slot(self) -> Tensor:
        """Slot [1] that is written next in rows that have their sinks."""
        num_sinks, sizes = self.sizes.num_sinks, self.sizes
        return (self.count.end[:1] - num_sinks) % sizes.num_window_slots + num_sinks

    def order(self, num: int) -> slice | Tensor:
        """Slots of the newest entries before the pass (see `order_of`)."""
        return order_of(self.sizes, self.stored, self.end, num, self.device)

    def oldest(self, num: int) -> Tensor:
        """Slots [num] of the oldest entries after the sinks in the longest row, of those that one
        new token sees.
        """
        if self.decode is not None and self.decode.order is not None:
            return self.decode.order[:num] + self.sizes.num_sinks
        num_window = self.num_visible - self.sizes.num_sinks
        return slots_of(self.sizes, self.end + 1 - num_window, num, self.device)

    def at(self, num: int, num_new: int = 0) -> slice | Tensor:
        """Positions of `num` entries in the order of time, of which so many are new: a slice, or
        [B, 1, S] if those of rows differ.
        """
        if len(set(self.positions)) == 1:
            end = self.positions[0] + num_new
            return slice(end - num, end)
        ends = torch.tensor(self.positions, device=self.device)[:, None, None] + num_new
        return ends + torch.arange(-num, 0, device=self.device)

    def at_places(self, places: Tensor | None) -> slice | Tensor:
        """Positions of what attention gets for one new token, at these places, [B or 1, 1, S]; a
        slice if it is in the order of time.
        """
        if self.in_order:
            return self.at(self.length, 1)
        first = self.count.positions - self.count.stored
        assert places is not None
        return (places.clamp_min(0) + first[:, None])[:, None]

    @property
    def evicting(self) -> Flags:
        """Return which of the new tokens come after something was evicted."""
        least = self.sizes.first_input_len
        if not self.is_static:
            if min(self.seen) >= least:
                return True
            if max(self.seen) + self.num_new <= least:
                return False
        return self.count.seen[:, None] + torch.arange(self.num_new, device=self.device) >= least

    @property
    def evicts(self) -> bool:
        """Return whether an entry is evicted before the next pass."""
        dropped = self.sizes.num_dropped
        return any(dropped(n + self.num_new) > dropped(n) for n in self.seen)

    def inputs_of(self, model: PreTrainedModel, spec: ModelSpec) -> dict[str, Any]:
        """Return the model's extra inputs: positions, and a mask over what shorter rows lack."""
        inputs: dict[str, Any] = {}
        if self.place_positions is not None or len(set(self.positions)) > 1 or not self.is_even:
            places = torch.tensor(self.positions)[:, None] + torch.arange(self.num_new)
            inputs["position_ids"] = position_ids(places.to(model.device), self.place_positions)
        if not self.is_even and self.in_order:
            visible, before = self.visible.to(model.device), self.position - self.num_before
            mask: Any = rows_mask(model, spec, visible, before)
            if spec.states:  # which go by no mask: each row has its own token
                mask = dict.fromkeys(model.config.layer_types) | {"full_attention": mask}
            inputs["attention_mask"] = mask
        return inputs

    def as_decode(
        self,
        asks_for_places: bool,
        are_bare: bool = False,
        in_sight: InSight | None = None,
        asks_for_order: bool = False,
    ) -> DecodeStep:
        """The usual pass, described for attention that asks where entries are, or in which order
        they were written, for keys that are stored bare, or for our kernel.
        """
        positions = position_ids(self.count.positions[:, None], self.place_positions)
        read = None
        birth: slice | Tensor | None = None
        places = self.places if asks_for_places else None
        if self.in_order:
            stored = [n + 1 for n in self.stored]
            read = order_of(self.sizes, stored, self.end + 1, self.length, self.device)
            if isinstance(read, slice) and read.start == 0:  # it lies in order
                read = None
        if self.is_alike:
            birth = slice(self.births[0], self.births[0] + 1)
            if self.is_static and self.hides:
                birth = self.count.births[:1]
        return DecodeStep(
            slot=self._slot,
            read=read,
            position_ids=positions,
            at=positions[:, None],
            behind=self.behind_rows,
            birth=birth,
            evicting=self.evicting,
            places=places,
            order=self.window_order if asks_for_order and self.is_even else None,
            all_at=self.at_places(places) if are_bare else None,
            reading=None,
            in_sight=in_sight,
        )


def position_ids(places: Tensor, place_positions: Tensor | None) -> Tensor:
    """Return what a model is told of tokens at these places."""
    return places if place_positions is None else place_positions.to(places.device)[places]


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
