"""Recall: how the queries of a pass take back entries, the same way for the memories of all layers.

A query is rotated as if the entries it looks for lay right before its window. The entries that are
found replace the oldest entries of the window.
"""

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvalign.aligners import Move
from kvalign.aligners.entries import KV
from kvalign.aligners.table import TABLES, TableAligner, version_of
from kvalign.cache.attention import Recalled
from kvalign.cache.passes import COUNTS, HOST, Pass, Sight
from kvalign.cache.realigner import Realigner
from kvalign.cache.sizes import CacheSizes
from kvalign.memory.recall_places import RecallPlaces
from kvalign.models import kernel
from kvalign.models.rope import Angles
from kvalign.models.wrapped import no_autograd_modes


class Matches(NamedTuple):
    """Entries that each of T queries takes back, oldest first.

    Attributes:
        entries: [B, H, T, R, D], without positions.
        ages: [B, H, T, R] int64, tokens from each entry to the query.
        visible: [B, H, T, R] bool; false where fewer than R entries were found.
    """

    entries: KV
    ages: Tensor
    visible: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> "Matches":
        """The same there, entries in this dtype."""
        entries = self.entries.map(lambda x: x.to(device, dtype))
        return Matches(entries, self.ages.to(device), self.visible.to(device))


class EvictedSlots:
    """Entries of a ring of slots that the windows of T queries have lost; one row if all rows are
    equal.

    Args:
        places: of what is taken back.
        seen: [B, T] int64, tokens before each query.
        end: [B] int64, number of tokens of each row in the memory.
        least: fewest tokens before a query.
        num_slots: slots of the ring.
        device: where it lies.
        angles: as of `QueryBatch`.

    Attributes:
        newest: [B, 1, 1, 1] int64, slot of the newest entry if the ring had no end.
        since: [B, 1, T, 1] int64, tokens after the newest entry.
        oldest: [B, 1, T, 1] int64, age of the oldest lost entry; 0 if none is lost.
        are_many: whether each query has lost as many entries as are compared.
    """

    def __init__(
        self,
        places: RecallPlaces,
        seen: Tensor,
        end: Tensor,
        least: int,
        num_slots: int,
        device: torch.device,
        angles: Angles | None = None,
    ):
        sizes = places.sizes
        self.num_slots, self.near, self.device = num_slots, sizes.num_in_sight, device
        self.angles = None if angles is None else angles.to(device)
        self._recency = places.recency
        seen, newest = seen[:, None, :, None], end[:, None, None, None] - 1
        oldest = (seen - sizes.num_sinks).clamp_max(self.near + sizes.memory)
        oldest = oldest.where(seen >= sizes.first_input_len, 0)
        self._num_compared = min(places.num_compared, num_slots)
        num_lost = min(least - sizes.num_sinks - self.near, sizes.memory)
        self.are_many = least >= sizes.first_input_len and num_lost >= self._num_compared
        of_ages = newest - sizes.num_sinks, seen - newest, oldest
        self.newest, self.since, self.oldest = (x.to(device) for x in of_ages)

    @cached_property
    def worths(self) -> Tensor:
        """Return what is added to the score of an entry of each age, from A - 1 down to 0: [A]
        float32, on the host.
        """
        # Entries that are not yet in the memory are in the window, so no age is greater.
        return _worths(self.num_slots + self.near + 1, self._recency)

    @cached_property
    def worth(self) -> Tensor:
        """Return what is added to the score of each entry, [B, 1, T, S] float32; -inf: not lost."""
        ages = self.ages(torch.arange(self.num_slots, device=self.device))
        is_lost = (ages > self.near) & (ages <= self.oldest)
        return _worth(ages, self._recency).where(is_lost, -torch.inf)

    @cached_property
    def newer(self) -> Tensor:
        """Return for each of M entries in the order of time 0 for newer ones, -inf for the others:
        [M, M] float32.
        """
        num = self._num_compared
        return torch.full((num, num), -torch.inf, device=self.device).tril()

    def ages(self, slots: Tensor, queries: slice = slice(None)) -> Tensor:
        """Return ages of the entries in slots [B, H, T, R], or [R] for all: tokens to a query."""
        return (self.newest - slots).remainder(self.num_slots) + self.since[:, :, queries]


def _worth(ages: Tensor, recency: float) -> Tensor:
    """Return what is added to the scores of entries of these ages, float32."""
    return -recency * ages.clamp_min(1).float().log()


@lru_cache(maxsize=4)
@no_autograd_modes()
def _worths(num: int, recency: float) -> Tensor:
    return _worth(torch.arange(num - 1, -1, -1), recency)


class QueryBatch:
    """Queries that search together: those of a block of a segment, or one per row.

    Args:
        places: of what they take back.
        seen: [B, T] int64, tokens before each query; one row if all are equal.
        end: [B] int64, number of tokens of each of these rows in the memory.
        least: fewest tokens before a query.
        positions: positions of the queries, one number or [B, 1, 1, T].
        angles: by which queries are rotated, as if the entries they look for lay right before the
            window.
    """

    def __init__(
        self,
        places: RecallPlaces,
        seen: Tensor,
        end: Tensor,
        least: int,
        positions: int | Tensor = 0,
        angles: Angles | None = None,
    ):
        self.places, self.positions, self.angles = places, positions, angles
        self.seen, self.end, self.least = seen, end, least
        self._evicted_slots: dict[torch.device, EvictedSlots] = {}

    def evicted_slots(self, num_slots: int, device: torch.device = HOST) -> EvictedSlots:
        """Return what rings of so many slots may give; made once, as layers have equally many."""
        if device not in self._evicted_slots:
            of_queries = self.places, self.seen, self.end, self.least
            self._evicted_slots[device] = EvictedSlots(*of_queries, num_slots, device, self.angles)
        return self._evicted_slots[device]


class Recall:
    """Recall for all layers of a cache.

    Args:
        placer: realigner that places entries by their original positions.
        places: places of the entries that are taken back.
        layer_bias: by number of the layer, what is added to the scores of what is taken back, in
            nats. Layers without a number take nothing back; they store entries, too, so that an
            edit can fill their windows.
    """

    def __init__(
        self,
        sizes: CacheSizes,
        placer: Realigner,
        places: RecallPlaces,
        layer_bias: Mapping[int, float],
    ):
        self.sizes, self.placer, self.places, self.layer_bias = sizes, placer, places, layer_bias
        assert sizes.num_recalled is not None
        # The slots of a step whose entries, the window's oldest, give way.
        self.slots = slice(sizes.num_sinks, sizes.num_sinks + sizes.num_recalled)
        self._tables = placer.aligner if isinstance(placer.aligner, TableAligner) else None
        is_fit = placer.aligner is self._tables and kernel.can_rotate(placer.rotation)
        self._has_kernel = is_fit and kernel.is_here()
        self._placings: dict[int, kernel.Placing] = {}
        self._version: tuple[tuple[int, int], ...] = ()

    def batch_of(self, step: Pass, sight: Sight) -> QueryBatch:
        """The queries of a sight, for whichever layer."""
        if sight.batch is None:
            self._refresh()
            sight.batch = self._batch_of(step, sight)
        return sight.batch

    def prepare(self) -> None:
        """Make all that our kernel needs of places."""
        for layer in self.layer_bias if self._has_kernel else ():
            self._of_layer(layer)

    def _refresh(self) -> None:
        """Forget the tables, if they have changed."""
        if self._tables is not None and self._version != (version := version_of(self._tables)):
            self._placings.clear()
            self._version = version

    def _batch_of(self, step: Pass, sight: Sight) -> QueryBatch:
        # Tokens are counted on the host, but in a step that is recorded.
        rows, least = slice(1 if len(set(step.seen)) == 1 else None), min(step.seen)
        seen, end = (step.counts[COUNTS.index(name), rows] for name in ("seen", "remembered"))
        seen = seen[:, None]
        if step.is_segment:
            seen = seen + torch.arange(sight.queries.start, sight.queries.stop)
            end, least = end + sight.queries.stop, least + sight.queries.start
            positions = step.model_positions[0, sight.queries]
        else:
            rows = slice(1 if len(set(step.positions)) == 1 else None)
            positions = step.of_rows("positions")[rows, None, None, None]
        angles, rotation = None, self.placer.rotation
        if rotation is not None:
            angles = rotation.angles(positions - self.places.near)
        return QueryBatch(self.places, seen, end, least, positions, angles)

    def rotate_queries(self, query: Tensor, batch: QueryBatch) -> Tensor:
        """Scaled queries [B, H, G, T, D], rotated as if what they ask for lay right before the
        window, for entries without a position.
        """
        return query if batch.angles is None else batch.angles.to(query.device).rotate(query)

    def place_without_rotation(self, layer: int, batch: QueryBatch, matches: Matches) -> KV:
        """Return the matches, [B, H, T, R, D] each, at their places, before a
        rotation. If any place is free, a table is read at the places of the entries that give way.
        """
        if self.placer.aligner is None:
            return matches.entries
        if self.placer.rotation is not None:
            at = torch.arange(self.slots.start, self.slots.stop, device=matches.ages.device)
        else:
            now = batch.positions
            if isinstance(now, Tensor):
                now = now.view(-1, 1, matches.ages.shape[2], 1).to(matches.ages.device)
            at = self.places.at(matches.ages, now)  # [R] or [B, H, T, R]
            at = at.transpose(1, 2).flatten(0, 1) if at.dim() > 1 else at
        entries = matches.entries.map(lambda x: x.transpose(1, 2).flatten(0, 1))  # [B * T, H, R, D]
        placed = self.placer.place_without_rotation(layer, entries, Move(0, self.slots.start, at))
        of_rows = len(matches.ages), -1
        return placed.map(lambda x: x.unflatten(0, of_rows).transpose(1, 2))

    def as_seen(self, layer: int, queries: Tensor, batch: QueryBatch, matches: Matches) -> Recalled:
        """Return what queries [B, H, G, T, D] float32 take back, as each sees it."""
        keys, values = self.place_without_rotation(layer, batch, matches).map(
            lambda x: x.to(queries.dtype)
        )
        queries = queries.transpose(2, 3)  # [B, H, T, G, D]
        if (rotation := self.placer.rotation) is not None:
            keys = rotation.shift(keys, self.places.beyond(matches.ages))
        scores, bias = queries @ keys.mT, self.bias(layer, matches)
        scores = scores if bias is None else scores + bias[:, :, :, None]
        log_sum = scores.logsumexp(-1)
        output = (scores - log_sum[..., None]).exp().nan_to_num(0.0) @ values
        return Recalled(output.transpose(2, 3), log_sum.transpose(2, 3))

    def placing(self, layer: int, queries: Tensor, batch: QueryBatch) -> kernel.Placing | None:
        """Return how our kernel places what queries [B, H, G, T, D] of a layer find, once it has
        rotated them; None: it cannot, or a slope is asked for.
        """
        if not self._has_kernel or queries.requires_grad:
            return None
        placing = self._of_layer(layer)
        if placing.tables is None or placing.angles is not None or placing.far is None:
            return placing
        now = torch.as_tensor(batch.positions)
        now = now.reshape(-1, now.shape[-1] if now.dim() else 1)
        return placing._replace(now=now.to(HOST).expand(batch.seen.shape).contiguous())

    def _of_layer(self, layer: int) -> kernel.Placing:
        if layer not in self._placings:
            self._placings[layer] = self._placing_of(layer)
        return self._placings[layer]

    @no_autograd_modes()
    def _placing_of(self, layer: int) -> kernel.Placing:
        places, tables = self.places, None
        if self._tables is not None:
            tables = [getattr(self._tables, name)[layer].to(HOST) for name in TABLES]
        return kernel.Placing(
            tables=tables,
            first=self.slots.start,
            angles=None if self.placer.rotation is None else self._angles,
            far=self._far if places.by_age else None,
            most_apart=places.most_apart(self.slots.stop - self.slots.start),
            room=places.room,
            age_bias=self._age_bias,
            bias=self.layer_bias[layer],
        )

    @cached_property
    @no_autograd_modes()
    def _far(self) -> Tensor:
        """Return how far beyond the window entries of each age lie without neighbours: [A]."""
        return self.places.far(torch.arange(self.sizes.num_in_sight + self.sizes.memory + 1))

    @cached_property
    @no_autograd_modes()
    def _age_bias(self) -> Tensor | None:
        return self.places.age_bias(torch.arange(self.sizes.num_in_sight + self.sizes.memory + 1))

    @cached_property
    @no_autograd_modes()
    def _angles(self) -> Tensor:
        """Angles that move keys as far as they may lie beyond the window."""
        assert self.placer.rotation is not None
        num, places = self.slots.stop - self.slots.start, self.places
        most = num
        if places.by_age:
            most = min(places.room, int(self._far[-1]) + 1 + num * places.most_apart(num))
        angles = self.placer.rotation.angles(torch.arange(most + 1))
        return torch.stack([angles.cos, angles.sin])[None]

    def bias(self, layer: int, matches: Matches) -> Tensor | None:
        """Return what is added to the scores of matches, [B, H, T, R] float32: -inf if one is
        not visible; None: nothing.
        """
        ages, layer_bias = matches.ages, self.layer_bias[layer]
        if (added := self.places.age_bias(ages)) is None:
            on_cpu = ages.device.type == "cpu" and not torch.compiler.is_compiling()
            if not layer_bias and on_cpu and matches.visible.all():  # others would be waited for
                return None
            added = torch.zeros_like(ages, dtype=torch.float32)
        return (added + layer_bias).masked_fill(~matches.visible, -torch.inf)
