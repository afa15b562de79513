"""Layer of the streaming cache: its buffers, and the slice that attention gets."""

from collections.abc import Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor

from kvalign.aligners import Move
from kvalign.cache.ring import KV, KVBuffer, cat
from kvalign.cache.form import Form, form_of
from kvalign.cache.layer import Owner, StreamingLayer
from kvalign.cache.saved import ReadTensor
from kvalign.cache.sinks import Sinks
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.step import Step
from kvalign.models.attention import mark


class WindowLayer(StreamingLayer):
    """Sinks and a window in a sliding buffer.

    Attributes:
        buffers: `entries` and `sources`, which may be one; none before the first entry.
    """

    def __init__(self, cache: Owner, layer_idx: int, sinks: Sinks, sizes: CacheSizes):
        self.sinks, self.sizes = sinks, sizes
        super().__init__(cache, layer_idx)

    def reset(self) -> None:
        super().reset()
        self.buffers: list[KVBuffer] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate buffers for entries like these."""
        like, realigner = KV(key_states, value_states), self.cache.realigner
        self.dtype, self.device = key_states.dtype, key_states.device
        form = form_of(self.sizes, self.dtype, self.cache.bare_keys(self.layer_idx))
        self.buffers = [KVBuffer(like, self.sizes, form)]
        if realigner.moves and not (realigner.recursive and self.dtype == torch.float32):
            dtype = torch.float32 if realigner.recursive else self.dtype
            self.buffers.append(KVBuffer(like, self.sizes, form_of(self.sizes, dtype)))
        self.sinks.make(like, form)
        self.is_initialized = True

    @property
    def entries(self) -> KVBuffer:
        """Entries in their stored form; attention gets a slice."""
        return self.buffers[0]

    @property
    def sources(self) -> KVBuffer:
        """Input of a realigner that moves entries: a buffer of its own; or `entries`, if nothing
        moves or moves start from the last output in the model's precision.
        """
        return self.buffers[-1]

    @property
    def is_filled(self) -> bool:
        return self.is_initialized and self.entries.end > 0

    def take(self, step: Step, new: KV) -> KV:
        if step.decode is not None:
            return self._take_one(step, new)
        realigner, segment = self.cache.realigner, step.segment
        form, at = self.entries.form, step.at(step.num_new, step.num_new)
        # 1. What is kept of the new entries.
        self.sinks.add(self.layer_idx, step, new, form)
        if segment is not None:
            new, at = KV(segment.turned(self.layer_idx, new.keys), new.values), segment.at
        anchored = self.without_position(step, new) if realigner.reads else new
        stored = KV(*form.stored_at(*anchored, at))
        # 2. What attention sees of a prefill chunk: all that was there, and all of the chunk.
        found = None
        if segment is not None:
            num_sinks = min(step.sizes.num_sinks, step.seen[0])
            sinks = self.sinks.of(self.layer_idx, self.device).slots(0, num_sinks)
            num = step.stored[0] - num_sinks
            found = cat(
                [
                    form.read_at(*sinks, slice(0, num_sinks)),
                    self.entries.last(num, step.at(num)),
                    form.read_at(*stored, at),
                ]
            )
            mark(found.keys, partial(segment.attend, self.layer_idx))
        elif step.num_new > 1:
            found = cat([*self.pieces(step), *self._new_pieces(step, new, stored)])
        # 3. They are written.
        self._write(step, stored, new)
        # 4. What attention sees of single tokens: a slice of what is stored.
        if found is None:
            found = self.entries.last(step.num_visible, step.at(step.num_visible, 1))
            if realigner.reads:
                mark(found.keys, partial(realigner.attend, step, self.layer_idx))
        return found

    def _take_one(self, step: Step, new: KV) -> KV:
        """A decode step: the same in every step of a full cache, for `torch.compile`."""
        realigner, decode = self.cache.realigner, step.decode
        assert decode is not None
        stored = new
        if realigner.reads or self.sources is not self.entries:
            anchored = KV(*realigner.anchor(self.layer_idx, *new, decode.birth, decode.at))
            if realigner.reads:
                stored = anchored
            else:
                self.sources.put(decode.slot, anchored)
        self.entries.put(decode.slot, KV(*self.entries.form.stored_at(*stored, decode.newest)))
        if decode.in_sight is not None:
            keys, values = self.entries.data.map(Tensor.detach)
            attend = partial(self.entries.form.bare.attend, decode.in_sight)
            return KV(mark(keys, attend), values)
        first = decode.slot + 1 - decode.num_visible
        found = self.entries.read(first, decode.num_visible, decode.all_visible)
        if realigner.reads:
            mark(found.keys, partial(realigner.attend, step, self.layer_idx))
        return found

    def pieces(self, step: Step) -> list[KV]:
        """Return the parts that attention reads, for rows of equal length: sinks and window, at the
        positions to which the new ones have run on.
        """
        num, first = step.stored[0], step.first_place
        held = self.entries.last(num, step.at(num))
        return self._as_read(step, held, min(num, step.sizes.num_sinks), first)

    def _new_pieces(self, step: Step, new: KV, stored: KV) -> list[KV]:
        """Return the new entries of a pass in parts, as attention will find them stored."""
        form, num = self.entries.form, step.num_new
        if not form.is_int8:  # it is the same but for the last digits
            return [new]
        held = KV(*form.read_at(*stored, step.at(num, num)))
        num_sinks = min(max(step.sizes.num_sinks - step.seen[0], 0), num)
        return self._as_read(step, held, num_sinks, step.births[0] + num_sinks)

    def _as_read(self, step: Step, held: KV, num_sinks: int, first: int) -> list[KV]:
        """Return sinks, and the entries behind them from the cache slot `first` on, as attention
        sees them.
        """
        realigner, num = self.cache.realigner, held.keys.shape[2] - num_sinks
        now = torch.arange(first, first + num, device=self.device)
        at = now + step.behind[0] if realigner.rotation else now
        window = realigner.read(self.layer_idx, *held.slots(num_sinks, num), now, at)
        return [held.slots(0, num_sinks), KV(*window).map(lambda x: x.to(self.dtype))]

    def move(self, step: Step, shifts: list[int]) -> None:
        """Move the entries after the sinks by `shifts`, row by row if rows differ."""
        realigner, num_sinks = self.cache.realigner, step.sizes.num_sinks
        alike = len(set(zip(shifts, step.stored, step.behind, strict=True))) == 1
        for rows in [slice(None)] if alike else [slice(i, i + 1) for i in range(len(shifts))]:
            if not shifts[rows][0]:
                continue
            num, first = step.stored[rows][0] - num_sinks, num_sinks + step.behind[rows][0]
            now = torch.arange(first, first + num, device=self.device)
            source = self.sources.stored(num).rows(rows)
            placed = realigner.place(self.layer_idx, *source, Move(shifts[rows][0], first, now))
            self.entries.rewrite(KV(*placed), rows)
            if realigner.recursive and self.sources is not self.entries:
                self.sources.rewrite(KV(*placed), rows)

    def write_sinks(self, step: Step, sinks: KV) -> None:
        """Write sinks, given as they are stored, in front of each row's window."""
        num, end = step.sizes.num_sinks, self.entries.end
        if step.is_even:
            self.entries.data.slots(end - step.num_before, num).put(sinks)
            return
        full = [row for row, seen in enumerate(step.seen) if seen >= num]
        starts = torch.tensor([end - step.stored[row] for row in full])
        rows, slots = torch.tensor(full)[:, None], starts[:, None] + torch.arange(num)
        for data, x in zip(self.entries.data, sinks, strict=True):
            data[rows, :, slots] = x[rows[:, 0]].transpose(1, 2).to(data.dtype)

    def _write(self, step: Step, stored: KV, new: KV) -> None:
        """Append the entries that stay after this pass; if they move, also their source."""
        kept, num_new = step.num_before, step.num_new
        if num_new > 1 or step.segment is not None:
            after = step.sizes.num_stored(step.seen[0] + num_new)
            num_new = min(num_new, after)
            kept = after - num_new
        for buffer in self.buffers:
            buffer.make_room(kept, num_new)
        num_gone = step.num_new - num_new
        self.entries.write(stored.slots(num_gone, num_new))
        if self.sources is not self.entries:
            source = self.without_position(step, new)
            self.sources.write(source.slots(num_gone, num_new))

    def select(self, rows: Tensor) -> None:
        for buffer in self.buffers:
            buffer.select(rows)

    def join(self, layers: Sequence[Self]) -> None:
        if not self.is_initialized:
            self.lazy_initialization(*layers[0].entries.last(0, slice(0, 0)))
        of_layers = [(layer.cache.num_stored, layer.buffers) for layer in layers]
        width = max(num for num, _ in of_layers)
        for j, buffer in enumerate(self.buffers):
            rows = (buffers[j].stored(num).padded(width) for num, buffers in of_layers)
            buffer.replace(cat(rows, dim=0))

    def state(self) -> dict[str, Tensor]:
        num, sinks = self.cache.num_stored, self.sinks.of(self.layer_idx, self.device)
        held = dict(zip(_names(self.entries.form), (self.entries.stored(num), sinks), strict=True))
        if self.sources is not self.entries:
            held["sources"] = self.sources.stored(num)
        return {f"{name}.{j}": x for name, pair in held.items() for j, x in enumerate(pair)}

    def restore(self, read: ReadTensor, seen: list[int], head_dim: int, dtype: torch.dtype) -> None:
        width, form = max(map(self.sizes.num_stored, seen)), form_of(self.sizes, dtype)
        of_entries, of_sinks = _names(form)
        entries = read_kv(read, of_entries, width, head_dim, form)
        self.lazy_initialization(*entries.slots(0, 0).map(form.read))
        sinks = read_kv(read, of_sinks, self.sizes.num_sinks, head_dim, form)
        self.sinks.of(self.layer_idx, self.device).put(sinks)
        self.entries.replace(entries)
        if self.sources is not self.entries:
            sources = read_kv(read, "sources", width, head_dim, self.sources.form)
            self.sources.replace(sources)


def _names(form: Form) -> tuple[str, str]:
    """Names of entries and sinks in a state."""
    return ("bare", "bare_sinks") if form.is_int8 else ("entries", "sinks")


def read_kv(
    read: ReadTensor,
    name: str,
    length: int,
    head_dim: int,
    form: Form,
    device: str | None = None,
) -> KV:
    """Entries of a saved state, `length` of them, as they are stored."""
    shape, dtype = (length, form.width(head_dim)), form.stored_dtype
    return KV(*(read(f"{name}.{j}", shape, dtype, device) for j in range(2)))
