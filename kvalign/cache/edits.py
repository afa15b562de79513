"""Entries of a cache, taken into another one at new places: what an edit of a stream is made of.

    before   0 1 2 3 | 4 5 6 7 8 9 10     tokens 6 and 7 are cut
    after    0 1 2 3 | 4 5 8 9 10         8, 9 and 10 move two places

An entry keeps its stored form, which has no position or can be rotated to another. Only one that
becomes a sink, or ceases to be one, changes its form. The result is as if these tokens were all
that the stream ever had: the entry of place p is at position p.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Self

import torch

from kvalign.aligners import Move
from kvalign.aligners.entries import KV, cat
from kvalign.cache.realigner import Realigner, rotated
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.cache.window_layer import WindowLayer
from kvalign.foundation.errors import UserError
from kvalign.models.wrapped import no_autograd_modes


@dataclass(frozen=True)
class EntryPart(ABC):
    """Entries of all layers at the places from `first` to `stop`, which rows have alike.

    Attributes:
        place: the new place of the first of them.
    """

    first: int
    stop: int
    place: int = field(default=0, kw_only=True)

    @property
    def num(self) -> int:
        return self.stop - self.first

    @property
    @abstractmethod
    def num_rows(self) -> int: ...

    @abstractmethod
    def like(self, i: int) -> KV:
        """Some entries, as attention gets them, of the i-th layer with attention."""

    @abstractmethod
    def is_raw(self, num_sinks: int) -> bool:
        """Return whether they are stored as they were encoded, keys at their own positions."""

    @abstractmethod
    def raw(self, i: int) -> tuple[KV, slice]:
        """Those of a layer, as they were encoded, and their positions then."""

    def split(self, *firsts: int) -> Iterator[Self]:
        """Return it in parts, which begin at these of its places."""
        inside = sorted({x for x in firsts if self.first < x < self.stop})
        for first, stop in pairwise([self.first, *inside, self.stop]):
            if first < stop:
                yield replace(self, first=first, stop=stop, place=self.place + first - self.first)


@dataclass(frozen=True)
class CachePart(EntryPart):
    """Entries of a cache.

    Attributes:
        layers: of the cache.
        behind: as of its `Pass`.
        offset: number of entries that were written before the one of place 0, had all been.
    """

    layers: Sequence[WindowLayer]
    behind: int
    offset: int

    @property
    def written(self) -> int:
        """Number of entries that had been written before the first, which is not a sink."""
        return self.offset + self.first

    @property
    def num_rows(self) -> int:
        return len(self.layers[0].entries.data.keys)

    def like(self, i: int) -> KV:
        return self.layers[i].entries.like()

    def is_raw(self, num_sinks: int) -> bool:
        return self.first < num_sinks

    def stored_raw(self, i: int) -> KV:
        """Sinks of a layer, as they are stored."""
        return self.layers[i].stored_sinks(self.stop).slots(self.first, self.num)

    def raw(self, i: int) -> tuple[KV, slice]:
        at = slice(self.first, self.stop)
        return self.layers[i].entries.form.decode_at(self.stored_raw(i), at), at


@dataclass(frozen=True)
class EncodedPart(EntryPart):
    """Entries that were encoded without a cache.

    Attributes:
        entries: of each layer with attention [B, H, S, D]. That of place 0 is their first.
        at: its position when it was encoded.
    """

    entries: Sequence[KV]
    at: int

    @property
    def num_rows(self) -> int:
        return len(self.entries[0].keys)

    def rows(self, some: slice | list[int]) -> Self:
        """Those of some rows."""
        return replace(self, entries=[x.rows(some) for x in self.entries])

    def like(self, i: int) -> KV:
        return self.entries[i]

    def is_raw(self, num_sinks: int) -> bool:
        return True

    def raw(self, i: int) -> tuple[KV, slice]:
        was = slice(self.at + self.first, self.at + self.stop)
        return self.entries[i].slots(self.first, self.num), was


def check_editable(cache: StreamingCache) -> None:
    """Raise UserError unless the entries of a cache can be moved to any place."""
    cache.realigner.from_birth()
    if len(cache.attention) < len(cache.layers):
        raise UserError(
            "this model cannot be edited: the state of its layers without attention is of all "
            "tokens at once"
        )
    if cache.memory is not None:
        cache.memory.check_editable()


def num_kept(cache: StreamingCache) -> int:
    """Entries of each row that an edit can move, in rows that are alike."""
    return max(map(cache.kept_sizes.num_stored, cache.seen), default=0)


def part_of(cache: StreamingCache, first: int, stop: int) -> CachePart:
    """Entries of a cache at the places from `first` to `stop`, sinks first, of those that it has
    kept, in rows that are alike.
    """
    step = cache.settle()
    assert step is not None
    return CachePart(first, stop, cache.attention, step.behind[0], step.end - step.stored[0])


@no_autograd_modes()
def take_parts(
    cache: StreamingCache, parts: Sequence[EntryPart], num_gone: int | None = None
) -> None:
    """Let a cache have the entries of these parts alone, one after the other. Those of caches are
    of caches with the same arguments, or of its own.

    Args:
        num_gone: tokens that were evicted before them; None: those of its own.
    """
    total = sum(part.num for part in parts)
    num_over = cache.kept_sizes.num_dropped(total)
    placed = in_places(parts, cache.sizes.num_sinks, num_over)
    if num_gone is None:
        num_gone = cache.num_tokens[0] - num_kept(cache)
    with cache.changing():
        for i, layer in enumerate(cache.attention):
            if not layer.is_initialized:
                layer.lazy_initialization(*parts[0].like(i))
            if placed and cache.memory is not None:
                layer.replace(cache.memory.take_parts(layer, i, placed, total - num_over))
            elif placed:
                layer.replace(ring_entries(layer, i, placed))
        rows = parts[0].num_rows
        cache._hold_in_order([total - num_over] * rows, [num_gone + num_over] * rows)


def in_places(parts: Sequence[EntryPart], num_sinks: int, num_evicted: int) -> list[EntryPart]:
    """Parts that follow one another, each with its new place, in parts that are sinks or not
    before and afterwards. So many entries behind the sinks are evicted.
    """
    placed, total = [], 0
    for part in parts:
        whole, to_place = replace(part, place=total), part.first - total
        total += part.num
        firsts = (num_sinks, num_sinks + to_place, num_sinks + num_evicted + to_place)
        for one in whole.split(*firsts):
            if one.place < num_sinks:
                placed.append(one)
            elif one.place >= num_sinks + num_evicted:
                placed.append(replace(one, place=one.place - num_evicted))
    return placed


def ring_entries(layer: WindowLayer, i: int, parts: Sequence[EntryPart]) -> list[KV]:
    """Entries for the rings of a layer, the i-th with attention, in the order of their places; of
    rotary keys, sinks are at their own positions.
    """
    of_rings = zip(*(_of_rings(layer, i, part) for part in parts), strict=True)
    return [cat(x) for x in of_rings]


def _of_rings(layer: WindowLayer, i: int, part: EntryPart) -> list[KV]:
    num_sinks = layer.sizes.num_sinks
    if part.place < num_sinks:
        return [as_sinks(layer, i, part)] * len(layer.rings)
    if part.is_raw(num_sinks):
        return in_window(layer, bare(layer, i, part), part.place)
    assert isinstance(part, CachePart)
    rings, realigner = part.layers[i].written(part.written, part.num), layer.realigner
    shift = part.first + part.behind - part.place
    if shift and realigner.strategy == "move":
        rings[0] = _placed(realigner, layer, rings[-1], part.place)
    elif shift and realigner.runs_on and not layer.entries.form.is_int8:
        rings[0] = rotated(realigner.rotation, layer.layer_idx, rings[0], shift)
    return rings


def as_sinks(layer: WindowLayer, i: int, part: EntryPart, without_position: KV | None = None) -> KV:
    """Entries that are sinks now, as they are stored; `without_position` is given of those that are
    at hand in that form.
    """
    num_sinks, at = layer.sizes.num_sinks, slice(part.place, part.place + part.num)
    if part.is_raw(num_sinks):
        if isinstance(part, CachePart) and part.first == part.place:
            return part.stored_raw(i)
        entries, was = _raw(layer, i, part)
        if was == at:
            return layer.entries.form.encode_at(entries, at)
    if without_position is None:
        without_position = bare(layer, i, part)
    placed = _placed(layer.realigner.from_birth(), layer, without_position, part.place)
    return layer.entries.form.encode_at(placed, at)


def bare(layer: WindowLayer, i: int, part: EntryPart) -> KV:
    """Entries without their positions."""
    realigner = layer.realigner
    if part.is_raw(layer.sizes.num_sinks):
        entries, was = _raw(layer, i, part)
        anchored = realigner.anchor(layer.layer_idx, entries, was, was)
        return _without_rotation(layer, anchored, was.start)
    assert isinstance(part, CachePart)
    rings, at = part.layers[i].written(part.written, part.num), part.first + part.behind
    if realigner.strategy == "move":
        return rings[-1]
    entries = layer.entries.form.decode_at(rings[0], slice(at, at + part.num))
    return _without_rotation(layer, entries, at)


def _raw(layer: WindowLayer, i: int, part: EntryPart) -> tuple[KV, slice]:
    entries, was = part.raw(i)
    return entries.map(lambda x: x.to(layer.device)), was


def _without_rotation(layer: WindowLayer, entries: KV, at: int) -> KV:
    """Entries without the rotation of the positions from `at` on, which keys that run on have."""
    if not layer.realigner.runs_on:
        return entries
    positions = torch.arange(at, at + entries.keys.shape[2], device=layer.device)
    return rotated(layer.realigner.rotation, layer.layer_idx, entries, positions)


def in_window(layer: WindowLayer, bare: KV, place: int) -> list[KV]:
    """Entries without their positions for the rings of a layer, at the positions from `place` on,
    which are not those of sinks.
    """
    realigner = layer.realigner
    if realigner.strategy == "move":
        return [_placed(realigner, layer, bare, place), bare]
    if realigner.runs_on:
        positions = torch.arange(place, place + bare.keys.shape[2], device=layer.device)
        bare = rotated(realigner.rotation, layer.layer_idx, bare, -positions)
    return [layer.entries.form.encode_at(bare, slice(place, place + bare.keys.shape[2]))]


def _placed(realigner: Realigner, layer: WindowLayer, bare: KV, place: int) -> KV:
    """Entries without their positions, at the places from `place` on."""
    now = torch.arange(place, place + bare.keys.shape[2], device=layer.device)
    return realigner.place(layer.layer_idx, bare, Move(0, place, now))
