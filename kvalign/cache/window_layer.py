"""Layer of the streaming cache: sinks, and a window in a ring."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from kvalign.aligners import Move
from kvalign.aligners.entries import KV, cat
from kvalign.cache.attention import Reader, Recaller, attend
from kvalign.cache.layer import Form, Owner, ReadTensor, Ring, SinkKeys, StreamingLayer
from kvalign.cache.passes import Pass, order_of, slots_of
from kvalign.cache.sizes import CacheSizes
from kvalign.models.attention import mark

if TYPE_CHECKING:
    from kvalign.memory.memories import Memories


class WindowLayer(StreamingLayer):
    """Sinks and a window.

    Attributes:
        memory: what stands behind the window; None: nothing.
        entries: in their stored form, which attention gets; there are none before the first.
        sources: input of a realigner that moves entries: a ring of its own; or `entries`, if
            nothing moves or moves start from the last output in the model's precision.
        rings: these two, or the one.
    """

    def __init__(
        self,
        cache: Owner,
        layer_idx: int,
        sinks: SinkKeys,
        sizes: CacheSizes,
        memory: "Memories | None" = None,
    ):
        self.sinks, self.sizes, self.memory = sinks, sizes, memory
        super().__init__(cache, layer_idx)

    def reset(self) -> None:
        super().reset()
        self.rings: list[Ring] = []
        for name in ("entries", "sources"):  # there are none before the first
            self.__dict__.pop(name, None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate rings for entries like these [B, H, ?, D]."""
        like, realigner = KV(key_states, value_states), self.realigner
        self.dtype, self.device = key_states.dtype, key_states.device
        form = self.cache.form(self.dtype, self.layer_idx)
        most = self.sizes.first_input_len
        self.rings = [Ring(like, most, form)]
        if realigner.strategy == "move" and not (
            realigner.recursive and self.dtype == torch.float32
        ):
            dtype = torch.float32 if realigner.recursive else self.dtype
            self.rings.append(Ring(like, most, Form(dtype)))
        self.entries, self.sources = self.rings[0], self.rings[-1]
        if self.cache.rotates_sinks:
            self.sinks.make(key_states)
        self.is_initialized = True

    def begin(self, step: Pass, shifts: list[int]) -> None:
        if shifts:
            self.move(step, shifts)
        if step.is_single and step.grows:
            for ring in self.rings:
                ring.grow(step.size)

    def take(self, step: Pass, new: KV) -> KV:
        if not step.is_decode and self.cache.rotates_sinks:
            self.sinks.add(self.layer_idx, step, new.keys)
        if not step.is_single:
            if not step.is_segment:
                return self._take_chunk(step, new)
            from kvalign.cache.segments import take_segment

            return take_segment(self, step, new)
        recall = None if self.memory is None else self.memory.take(self, step, new)
        if step.grows:
            for ring in self.rings:
                ring.grow(step.size)
        reader = self._reader(step, new, recall)
        if reader is None or reader.new is None:
            self._put(step, new)
        return self._seen(step, reader)

    def _reader(self, step: Pass, new: KV, recall: Recaller | None) -> Reader | None:
        """Return by what our attention reads slots for one token of a row; None: the model's reads
        them.
        """
        data, form, realigner = self.entries.data, self.entries.form, self.realigner
        is_raw = form.is_int8 and step.by_kernel and data.keys.is_cpu and self.cache.reads_stored
        is_read = realigner.strategy == "read"
        if not (is_raw or is_read or recall is not None or (step.hides and not step.in_order)):
            return None
        reader = realigner.reader(self.layer_idx)
        if recall is not None:
            reader = reader._replace(recall=recall)
        if is_raw:
            reader = reader._replace(angles=self.cache.angles, bases=form.bases)
        if not self._writes_by_kernel(step, new, reader, is_raw):
            return reader
        return reader._replace(new=(step.slot, *new, step.new_places))

    def _writes_by_kernel(self, step: Pass, new: KV, reader: Reader, is_raw: bool) -> bool:
        """Return whether our kernel writes the entry of a token as it attends."""
        ring, evicting = self.entries.data.keys, step.evicting
        corrects = evicting is False or (evicting is True and reader.network is not None)
        is_fit = ring.is_cpu and new.keys.dtype == torch.float32 and new.keys.stride(3) == 1
        return (
            (step.by_kernel and step.is_decode and step.read_slots is None)
            and (is_fit and new.values.stride(3) == 1 and (is_raw or ring.dtype == torch.float32))
            and (reader.tables is None or (reader.rotation is None and corrects))
            and self.realigner.strategy != "move"
        )

    def _put(self, step: Pass, new: KV) -> None:
        """Write one token of each row into its slot."""
        realigner, entries, slot = self.realigner, self.entries, step.slot.to(self.device)
        if realigner.strategy == "read":
            new = self.without_position(step, new)
        elif self.sources is not entries:
            self.sources.data.put_at(slot, self.without_position(step, new))
        if entries.form.is_int8:
            new = entries.form.encode_at(new, step.position_ids[:, None])
        entries.data.put_at(slot, new)

    def _seen(self, step: Pass, reader: Reader | None) -> KV:
        """Slots that attention gets for one token of each row: as they lie, but where it needs the
        order of time. A mark leads to our attention.
        """
        data, form = self.entries.data, self.entries.form
        if step.read_slots is not None:
            data = data.at(step.read_slots)
        elif data.keys.shape[2] > step.length:
            data = data.slots(0, step.length)
        if form.is_int8 and not (step.by_kernel and data.keys.is_cpu and self.cache.reads_stored):
            data = form.decode_at(data, step.read_positions)
        if reader is None:
            return data
        return KV(mark(data.keys.detach(), partial(attend, step, reader)), data.values)

    def _take_chunk(self, step: Pass, new: KV) -> KV:
        """Write the tokens of a chunk, and return all that was there, and all of them."""
        anchored = self.without_position(step, new) if self.realigner.strategy == "read" else new
        if self.memory is not None:
            self.memory.take(self, step, new, anchored)
        stored = self.entries.form.encode_at(
            anchored, step.last_positions(step.num_new, step.num_new)
        )
        entries = cat([*self.pieces(step), *self._new_pieces(step, new, stored)])
        self.write(step, stored, new)
        return entries

    def stored_sinks(self, num: int) -> KV:
        """Sinks as they are stored, keys at their own positions."""
        keys, values = self.entries.data.slots(0, num)
        if self.cache.rotates_sinks:
            keys = self.sinks.of(self.layer_idx, self.device)[:, :, :num]
        return KV(keys, values)

    def write(self, step: Pass, stored: KV, new: KV) -> None:
        """Write the entries that stay after a pass of several tokens; if they move, also their
        source.
        """
        sizes, seen, num_new = self.sizes, step.seen[0], step.num_lasting
        num_first = min(max(sizes.num_sinks - seen, 0), num_new)  # new sinks
        num_last = min(num_new - num_first, sizes.num_stored(seen + num_new) - sizes.num_sinks)
        num_last = max(num_last, 0)
        firsts = torch.arange(seen, seen + num_first, device=self.device)
        lasts = slots_of(sizes, step.end + num_new - num_last, num_last, self.device)
        slots = torch.cat([firsts, lasts])

        def put(ring: Ring, of_new: KV) -> None:
            ring.grow(step.end + num_new)
            parts = of_new.slots(0, num_first), of_new.slots(num_new - num_last, num_last)
            ring.data.put_at(slots, cat(parts))

        put(self.entries, stored)
        if self.sources is not self.entries:
            put(self.sources, self.without_position(step, new))

    def pieces(self, step: Pass) -> list[KV]:
        """Return the parts that attention reads, for rows of equal length: sinks and window, at the
        positions to which the new ones have run on.
        """
        num, first = step.stored[0], step.first_place
        stored = self.entries.data.at(step.last_slots(num))
        entries = self.entries.form.decode_at(stored, step.last_positions(num))
        return self._as_read(step, entries, min(num, step.sizes.num_sinks), first)

    def _new_pieces(self, step: Pass, new: KV, stored: KV) -> list[KV]:
        """Return the new entries of a pass in parts, as attention will find them stored."""
        form, num = self.entries.form, step.num_new
        if not form.is_int8:  # it is the same but for the last digits
            return [new]
        entries = form.decode_at(stored, step.last_positions(num, num))
        num_sinks = min(max(step.sizes.num_sinks - step.seen[0], 0), num)
        return self._as_read(step, entries, num_sinks, step.births[0] + num_sinks)

    def _as_read(self, step: Pass, entries: KV, num_sinks: int, first: int) -> list[KV]:
        """Return sinks, and the entries behind them from the place `first` on, as attention
        sees them.
        """
        realigner, num = self.realigner, entries.keys.shape[2] - num_sinks
        now = torch.arange(first, first + num, device=self.device)
        at = now + step.behind[0] if realigner.rotation else now
        window = realigner.read(self.layer_idx, entries.slots(num_sinks, num), now, at)
        return [entries.slots(0, num_sinks), window.map(lambda x: x.to(self.dtype))]

    def move(self, step: Pass, shifts: list[int]) -> None:
        """Move the entries after the sinks by `shifts`, row by row if rows differ."""
        realigner, num_sinks = self.realigner, step.sizes.num_sinks
        alike = len(set(zip(shifts, step.stored, step.behind, strict=True))) == 1
        for rows in [slice(None)] if alike else [slice(i, i + 1) for i in range(len(shifts))]:
            if not shifts[rows][0]:
                continue
            num, first = step.stored[rows][0] - num_sinks, num_sinks + step.behind[rows][0]
            now = torch.arange(first, first + num, device=self.device)
            slots = slots_of(self.sizes, step.end - num, num, self.device)
            source = self.sources.data.rows(rows).at(slots)
            move = Move(shifts[rows][0], first, now)
            placed = realigner.place(self.layer_idx, source, move)
            self.entries.data.rows(rows).put_at(slots, placed)
            if realigner.recursive and self.sources is not self.entries:
                self.sources.data.rows(rows).put_at(slots, placed)

    def select(self, rows: Tensor) -> None:
        for ring in self.rings:
            ring.select(rows)

    def join(self, layers: Sequence[Self]) -> None:
        if not self.is_initialized:
            self.lazy_initialization(*layers[0].entries.like())
        num_sinks = self.sizes.num_sinks
        width = max(max(layer.cache.num_stored for layer in layers) - num_sinks, 0)
        for j, ring in enumerate(self.rings):
            parts = []
            for layer in layers:
                num = max(layer.cache.num_stored - num_sinks, 0)
                layer.rings[j].grow(num_sinks)
                data = layer.rings[j].data
                window = data.at(slots_of(self.sizes, layer.cache.end - num, num, self.device))
                parts.append(cat([data.slots(0, num_sinks), window.padded(width)]))
            ring.replace(cat(parts, dim=0))

    def written(self, first: int, num: int) -> list[KV]:
        """Entries after the sinks that were written `first` and next, of each ring: views, if they
        lie side by side.
        """
        slot = self.sizes.slot(first)
        if slot + num <= self.sizes.first_input_len:
            return [ring.data.slots(slot, num) for ring in self.rings]
        slots = slots_of(self.sizes, first, num, self.device)
        return [ring.data.at(slots) for ring in self.rings]

    def replace(self, of_rings: Sequence[KV]) -> None:
        """Have these entries of each ring alone, as they are stored, in the order of their places:
        those of a stream of as many tokens.
        """
        for ring, stored in zip(self.rings, of_rings, strict=True):
            ring.replace(stored)
        if self.cache.rotates_sinks:
            keys = of_rings[0].keys[:, :, : self.sizes.num_sinks]
            self.sinks.of(self.layer_idx, self.device)[:, :, : keys.shape[2]] = keys

    def newest(self, ring: Ring, num: int) -> KV:
        """The newest entries of a ring between two passes, as they are stored, in the order of
        time.
        """
        stored = [self.sizes.num_stored(n) for n in self.cache.seen]
        return ring.data.at(order_of(self.sizes, stored, self.cache.end, num, self.device))

    def state(self) -> dict[str, Tensor]:
        from kvalign.cache.saving import window_state

        return window_state(self)

    def restore(self, read: ReadTensor, seen: list[int], head_dim: int, dtype: torch.dtype) -> None:
        from kvalign.cache.saving import restore_window

        restore_window(self, read, seen, head_dim, dtype)
