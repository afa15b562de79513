"""Entries of a cache, taken into another one at new places: what an edit of a stream is made of.

    before   0 1 2 3 | 4 5 6 7 8 9 10     tokens 6 and 7 are cut
    after    0 1 2 3 | 4 5 8 9 10         8, 9 and 10 move two places

An entry keeps its stored form, which has no position or can be rotated to another. Only one that
becomes a sink, or ceases to be one, changes its form. The result is as if these tokens were all
that the stream ever had: the entry of place p is at position p.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from kvalign.aligners import Move
from kvalign.aligners.entries import KV, cat
from kvalign.cache.realigner import Realigner, rotated
from kvalign.cache.window_layer import WindowLayer


@dataclass(frozen=True)
class CachePart:
    """Entries of a cache at the places from `first` to `stop`, which rows of it have alike.

    Attributes:
        layers: of the cache.
        behind: as of its `Step`.
        before: number of entries that were written before the one of place 0, had all been.
        place: the new place of the first of them.
    """

    layers: Sequence[WindowLayer]
    behind: int
    before: int
    first: int
    stop: int
    place: int = 0

    @property
    def num(self) -> int:
        return self.stop - self.first

    @property
    def written(self) -> int:
        """Number of entries that had been written before the first, which is not a sink."""
        return self.before + self.first

    def split(self, *firsts: int) -> Iterator["CachePart"]:
        """Return it in pieces, which begin at these of its places."""
        inside = sorted({x for x in firsts if self.first < x < self.stop})
        for first, stop in pairwise([self.first, *inside, self.stop]):
            if first < stop:
                yield replace(self, first=first, stop=stop, place=self.place + first - self.first)


def in_places(parts: Sequence[CachePart], num_sinks: int, num_evicted: int) -> list[CachePart]:
    """Parts that follow one another, each with its new place, in pieces that are sinks or not
    before and afterwards. So many entries behind the sinks are evicted.
    """
    pieces, total = [], 0
    for part in parts:
        whole, to_place = replace(part, place=total), part.first - total
        total += part.num
        firsts = (num_sinks, num_sinks + to_place, num_sinks + num_evicted + to_place)
        for piece in whole.split(*firsts):
            if piece.place < num_sinks:
                pieces.append(piece)
            elif piece.place >= num_sinks + num_evicted:
                pieces.append(replace(piece, place=piece.place - num_evicted))
    return pieces


def taken(layer: WindowLayer, i: int, pieces: Sequence[CachePart]) -> list[KV]:
    """Entries for the rings of a layer, the i-th with attention, in the order of their places; of
    keys that turn, sinks are at their own positions.
    """
    of_rings = zip(*(_piece(layer, piece.layers[i], piece) for piece in pieces), strict=True)
    return [cat(x) for x in of_rings]


def _piece(layer: WindowLayer, source: WindowLayer, piece: CachePart) -> list[KV]:
    num_sinks = layer.sizes.num_sinks
    if piece.place < num_sinks:
        return [as_sinks(layer, source, piece)] * len(layer.rings)
    if piece.first < num_sinks:
        return in_window(layer, bare_sinks(layer, source, piece), piece.place)
    rings, realigner = source.written(piece.written, piece.num), layer.realigner
    shift = piece.first + piece.behind - piece.place
    if shift and realigner.strategy == "move":
        rings[0] = _placed(realigner, layer, rings[-1], piece.place)
    elif shift and realigner.runs_on and not layer.entries.form.is_int8:
        rings[0] = rotated(realigner.rotation, layer.layer_idx, rings[0], shift)
    return rings


def as_sinks(
    layer: WindowLayer, source: WindowLayer, piece: CachePart, bare: KV | None = None
) -> KV:
    """Entries that are sinks now, as they are stored; `bare` are those that were not, if they are
    at hand without their positions.
    """
    was_sink = piece.first < layer.sizes.num_sinks
    if was_sink and piece.first == piece.place:
        return source.stored_sinks(piece.stop).slots(piece.first, piece.num)
    if bare is None:
        bare = (bare_sinks if was_sink else _bare)(layer, source, piece)
    placed = _placed(layer.realigner.from_birth(), layer, bare, piece.place)
    return layer.entries.form.encode_at(placed, slice(piece.place, piece.place + piece.num))


def bare_sinks(layer: WindowLayer, source: WindowLayer, piece: CachePart) -> KV:
    """Entries that were sinks, without their positions."""
    realigner, was = layer.realigner, slice(piece.first, piece.stop)
    sinks = source.stored_sinks(piece.stop).slots(piece.first, piece.num)
    sinks = layer.entries.form.decode_at(sinks, was)
    return _turned_back(layer, realigner.anchor(layer.layer_idx, sinks, was, was), piece.first)


def _bare(layer: WindowLayer, source: WindowLayer, piece: CachePart) -> KV:
    """Entries of the window, without their positions."""
    rings, at = source.written(piece.written, piece.num), piece.first + piece.behind
    if layer.realigner.strategy == "move":
        return rings[-1]
    held = layer.entries.form.decode_at(rings[0], slice(at, at + piece.num))
    return _turned_back(layer, held, at)


def _turned_back(layer: WindowLayer, entries: KV, at: int) -> KV:
    """Entries without the rotation of the positions from `at` on, which keys that run on have."""
    if not layer.realigner.runs_on:
        return entries
    positions = torch.arange(at, at + entries.keys.shape[2], device=layer.device)
    return rotated(layer.realigner.rotation, layer.layer_idx, entries, positions)


def in_window(layer: WindowLayer, bare: KV, place: int) -> list[KV]:
    """Entries without their positions, for the rings of a layer, at the positions from `place` on,
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
