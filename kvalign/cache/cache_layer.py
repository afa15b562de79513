"""One layer of the streaming cache: its buffers, and what attention gets of them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvalign.aligners import Move
from kvalign.aligners.base import Birth, KeysValues
from kvalign.cache.buffer import SlidingBuffer
from kvalign.cache.realign import OnRead, Realigner
from kvalign.cache.relative import read_step
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.step import Step
from kvalign.foundation.errors import UserError
from kvalign.models.attention import mark

if TYPE_CHECKING:
    from kvalign.cache.streaming_cache import StreamingCache

Read = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
"""Of a saved state the tensor of this name: [B, H, ...], of this shape from there on, and dtype."""

SLACK = 4  # a buffer has room for another 1 / SLACK of its entries


def slack_of(sizes: CacheSizes) -> int:
    """Entries that a buffer has room for beyond those that are seen at once: so many steps lie
    between two copies to its front.
    """
    return max(1, sizes.first_input_len // SLACK)


class StreamingLayer(CacheLayerMixin):
    """One layer of the cache.

    Attributes:
        entries: buffers of keys and values, as attention gets them.
        sources: what a realigner that moves entries places them from: the same buffers where it
            starts from its last output in the model's precision, empty where nothing moves.
        sinks: the first keys and values [B, H, num_sinks, D], as they were computed.
    """

    def __init__(self, cache: "StreamingCache", layer_idx: int):
        self.cache, self.layer_idx = cache, layer_idx
        self.is_initialized = False
        self.reset()

    def reset(self) -> None:
        self.is_initialized = False
        self.entries: list[SlidingBuffer] = []
        self.sources: list[SlidingBuffer] = []
        self.sinks: list[Tensor] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make buffers for entries like these."""
        cache, realigner = self.cache, self.cache.realigner
        self.dtype, self.device = key_states.dtype, key_states.device
        most, slack = cache.sizes.first_input_len, slack_of(cache.sizes)
        self.entries = [SlidingBuffer(most, slack) for _ in range(2)]
        self.source_dtype = self.dtype
        if realigner is not None and realigner.moves:
            if realigner.recursive:
                self.source_dtype = torch.float32
            is_same = realigner.recursive and self.dtype == torch.float32
            self.sources = (
                self.entries if is_same else [SlidingBuffer(most, slack) for _ in range(2)]
            )
        shape = (*key_states.shape[:2], cache.sizes.num_sinks, key_states.shape[3])
        self.sinks = [key_states.new_zeros(shape) for _ in range(2)]
        self.is_initialized = True

    @property
    def holds_anchored(self) -> bool:
        """Whether entries lie here without their position."""
        return isinstance(self.cache.realigner, OnRead)

    @property
    def is_filled(self) -> bool:
        """Whether it has been handed anything."""
        return bool(self.entries) and self.entries[0].end > 0

    @property
    def has_own_sources(self) -> bool:
        return bool(self.sources) and self.sources is not self.entries

    @property
    def buffers(self) -> list[SlidingBuffer]:
        return [*self.entries, *self.sources] if self.has_own_sources else self.entries

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> KeysValues:
        """Take in [B, H, T, D]; return all entries for this step's attention."""
        new, cache = (key_states, value_states), self.cache
        step = cache.step
        if step is None or (self.layer_idx == 0 and cache.ends_steps):
            if not self.is_initialized:
                self.lazy_initialization(*new)
            step = cache.begin_step(len(key_states), key_states.shape[2])
        found = self._take_one(step, new) if step.is_plain else self._take(step, new)
        if cache.ends_steps and self.layer_idx == len(cache.layers) - 1:
            cache.end_step()
        return found

    def _take_one(self, step: Step, new: KeysValues) -> KeysValues:
        """A plain step: a token [B, H, 1, D] is written, and a slice read."""
        realigner, stored = self.cache.realigner, new
        if isinstance(realigner, OnRead):
            stored = realigner.anchor(self.layer_idx, new[0], new[1], step.birth, step.at)
        pairs = [(self.entries, stored)]
        if realigner is not None and self.has_own_sources:
            source = realigner.anchor(self.layer_idx, new[0], new[1], step.birth, step.at)
            pairs.append((self.sources, source))
        for buffers, entries in pairs:
            for buffer, x in zip(buffers, entries, strict=True):
                buffer.data.narrow(2, step.end, 1).copy_(x)
        num, start = step.num_visible, step.end + 1 - step.num_visible
        keys, values = (buffer.data.narrow(2, start, num) for buffer in self.entries)
        if isinstance(realigner, OnRead):
            mark(keys, partial(read_step, step, self.layer_idx))
        return keys, values

    def _take(self, step: Step, new: KeysValues) -> KeysValues:
        """Any other: a first input, a segment, sinks, rows of unequal lengths."""
        cache = self.cache
        if not self.is_initialized:
            self.lazy_initialization(*new)
        self._add_sinks(step, new)
        if cache.segment is not None:
            new = (cache.segment.turned(new[0]), new[1])
        stored = self._stored_form(step, new)
        if cache.segment is not None:
            seen_sinks = min(self.cache.sizes.num_sinks, step.seen[0])
            window = step.stored[0] - seen_sinks
            found = [
                torch.cat(
                    [sinks[:, :, :seen_sinks], *([buffer.last(window)] if window else []), x], 2
                )
                for sinks, buffer, x in zip(self.sinks, self.entries, stored, strict=True)
            ]
            mark(found[0], partial(cache.segment.attend, self.layer_idx))
        elif step.num_new > 1:
            found = [torch.cat(pair, 2) for pair in zip(self.placed(step), new, strict=True)]
        self._write(step, stored, new)
        if cache.segment is None and step.num_new == 1:
            found = [buffer.last(step.num_visible) for buffer in self.entries]
            if isinstance(cache.realigner, OnRead):
                mark(found[0], partial(read_step, step, self.layer_idx))
        return found[0], found[1]

    def placed(self, step: Step) -> list[Tensor]:
        """The entries [B, H, S, D] before a step of even rows, as they are at the positions to
        which the new ones have run on.
        """
        num = step.stored[0]
        if not num:
            return [x[:, :, :0] for x in self.sinks]
        held, realigner = [buffer.last(num) for buffer in self.entries], self.cache.realigner
        first, num_sinks = step.first_place, min(num, step.sizes.num_sinks)
        if not isinstance(realigner, OnRead) or num == num_sinks:
            return held
        sinks, window = zip(*(x.split([num_sinks, num - num_sinks], 2) for x in held), strict=True)
        now = torch.arange(first, first + num - num_sinks, device=self.device)
        at = now + step.behind[0] if realigner.rotation else now
        placed = realigner.read(self.layer_idx, window[0], window[1], now, at)
        return [torch.cat(pair, 2).to(self.dtype) for pair in zip(sinks, placed, strict=True)]

    def move(self, step: Step, shifts: list[int]) -> None:
        """Bring the entries after the sinks `shifts` places nearer to the start, row by row where
        rows differ.
        """
        realigner = self.cache.realigner
        if realigner is None or not (realigner.moves or realigner.rotation):
            return
        alike = len(set(zip(shifts, step.stored, step.behind, strict=True))) == 1
        groups = [slice(None)] if alike else [slice(i, i + 1) for i in range(len(shifts))]
        for rows in groups:
            shift, num = shifts[rows][0], step.stored[rows][0]
            if not shift:
                continue
            if not realigner.moves:
                keys = self.entries[0].last(num)[rows]
                assert realigner.rotation is not None
                keys.copy_(realigner.rotation.shift(keys, shift))
                continue
            first, num = step.sizes.num_sinks + step.behind[rows][0], num - step.sizes.num_sinks
            move = Move(shift, first, torch.arange(first, first + num, device=self.device))
            sources = [buffer.last(num)[rows] for buffer in self.sources]
            placed = realigner.place(self.layer_idx, sources[0], sources[1], move)
            for buffer, x in zip(self.entries, placed, strict=True):
                buffer.last(num)[rows].copy_(x)
            if realigner.recursive and self.has_own_sources:
                for buffer, x in zip(self.sources, placed, strict=True):
                    buffer.last(num)[rows].copy_(x)

    def write_sinks(self, step: Step, keys: Tensor) -> None:
        """Put sinks [B, H, num_sinks, D], the keys turned, in front of each row's window."""
        num = step.sizes.num_sinks
        for buffer, sinks in zip(self.entries, (keys, self.sinks[1]), strict=True):
            if step.is_even:
                start = buffer.end - step.stored[0]
                buffer.data.narrow(2, start, num).copy_(sinks)
                continue
            full = [row for row, seen in enumerate(step.seen) if seen >= num]
            starts = torch.tensor([buffer.end - step.stored[row] for row in full])
            rows, places = torch.tensor(full)[:, None], starts[:, None] + torch.arange(num)
            buffer.data[rows, :, places] = sinks[rows[:, 0]].transpose(1, 2).to(self.dtype)

    def _add_sinks(self, step: Step, new: KeysValues) -> None:
        num_sinks = step.sizes.num_sinks
        if min(step.seen) >= num_sinks:
            return
        self.cache.forget_turned_sinks()
        for row, seen in enumerate(step.seen):
            num = min(step.num_new, num_sinks - seen)
            if num > 0:
                for sinks, x in zip(self.sinks, new, strict=True):
                    sinks[row, :, seen : seen + num] = x[row, :, :num].detach()

    def _stored_form(self, step: Step, new: KeysValues) -> KeysValues:
        """New entries as the buffers hold them: sinks as they are, others as the realigner anchors
        what is placed from birth.
        """
        realigner, first = self.cache.realigner, step.sizes.num_sinks
        if realigner is None or not self.holds_anchored:
            return new
        if step.num_new == 1 and step.places is not None:
            anchored = self._anchor(realigner, step, new)
            is_sink = torch.tensor(step.seen) < first
            if is_sink.any():
                is_sink = is_sink[:, None, None, None].to(self.device)
                anchored = [torch.where(is_sink, x, y) for x, y in zip(new, anchored, strict=True)]
            return anchored[0], anchored[1]
        skip = min(max(first - step.seen[0], 0), step.num_new)  # sinks among the new entries
        if skip == step.num_new:
            return new
        anchored = self._anchor(realigner, step, (new[0][:, :, skip:], new[1][:, :, skip:]), skip)
        if not skip:
            return anchored[0], anchored[1]
        pairs = zip(new, anchored, strict=True)
        keys, values = (torch.cat([x[:, :, :skip], y], 2) for x, y in pairs)
        return keys, values

    def _anchor(
        self, realigner: Realigner, step: Step, new: KeysValues, skip: int = 0
    ) -> list[Tensor]:
        """New entries, the first `skip` left out, without their position."""
        segment = self.cache.segment
        birth: Birth
        at: Birth
        if segment is not None:
            birth, at = segment.birth[skip:], segment.at[skip:]
        elif len(set(step.positions)) == len(set(step.births)) == 1:
            birth, at = (
                slice(x[0] + skip, x[0] + step.num_new) for x in (step.births, step.positions)
            )
        else:  # one token a row: rows take the place of entries
            birth, at = (torch.tensor(x, device=self.device) for x in (step.births, step.positions))
            turned = realigner.anchor(
                self.layer_idx, new[0].transpose(0, 2), new[1].transpose(0, 2), birth, at
            )
            return [x.transpose(0, 2).to(self.dtype) for x in turned]
        anchored = realigner.anchor(self.layer_idx, new[0], new[1], birth, at)
        return [x.to(self.dtype) for x in anchored]

    def _write(self, step: Step, stored: KeysValues, new: KeysValues) -> None:
        """Append what will still be kept after this step; with what moves, its source."""
        kept, num_new = max(step.stored), step.num_new
        if num_new > 1 or self.cache.segment is not None:
            after = step.sizes.num_stored(step.seen[0] + num_new)
            num_new = min(num_new, after)
            kept = after - num_new
        pairs = [(self.entries, stored)]
        if self.has_own_sources:
            assert self.cache.realigner is not None
            sources = (
                [x.float() for x in new]
                if self.cache.realigner.recursive
                else self._anchor(self.cache.realigner, step, new)
            )
            pairs.append((self.sources, (sources[0], sources[1])))
        for buffers, entries in pairs:
            for buffer, x in zip(buffers, entries, strict=True):
                x = x.detach()[:, :, x.shape[2] - num_new :]
                if step.num_new > 1 or not buffer.end or self.cache.segment is not None:
                    buffer.make_room(kept, num_new, x)
                buffer.write(x)

    def select(self, rows: Tensor) -> None:
        for buffer in self.buffers:
            buffer.select(rows)
        self.sinks = [x[rows.to(x.device)] for x in self.sinks]

    def join(self, layers: Sequence["StreamingLayer"], width: int) -> None:
        """Hold the rows of all these layers, the last `width` entries at most of each."""
        first = layers[0]
        if not self.is_initialized:
            self.lazy_initialization(*first.sinks)
        of_layers = [layer.buffers for layer in layers]
        self.sinks = [torch.cat([layer.sinks[j] for layer in layers]) for j in range(2)]
        for j, buffer in enumerate(self.buffers):
            parts = []
            for layer, buffers in zip(layers, of_layers, strict=True):
                held = buffers[j].last(layer.cache.num_stored)
                missing = held.new_zeros(*held.shape[:2], width - held.shape[2], held.shape[3])
                parts.append(torch.cat([missing, held], 2))
            buffer.replace(torch.cat(parts))

    def state(self, width: int) -> dict[str, Tensor]:
        """Its tensors by name, of the last `width` entries."""
        held = {"entries": [x.last(width) for x in self.entries], "sinks": self.sinks}
        if self.has_own_sources:
            held["sources"] = [x.last(width) for x in self.sources]
        return {f"{name}.{j}": x for name, pair in held.items() for j, x in enumerate(pair)}

    def restore(self, read: Read, width: int, head_dim: int, dtype: torch.dtype) -> None:
        """Take up what `state` gave."""

        def pair(name: str, length: int, dtype: torch.dtype) -> list[Tensor]:
            return [read(f"{name}.{j}", (length, head_dim), dtype) for j in range(2)]

        entries = pair("entries", width, dtype)
        self.lazy_initialization(*entries)
        self.sinks = pair("sinks", self.cache.sizes.num_sinks, dtype)
        held = [(self.entries, entries)]
        if self.has_own_sources:
            held.append((self.sources, pair("sources", width, self.source_dtype)))
        for buffers, tensors in held:
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer.replace(tensor)

    @property
    def keys(self) -> Tensor | None:
        """The keys that stay, as attention sees them: [B, H, S, D]; None before the first."""
        return self._seen(0)

    @property
    def values(self) -> Tensor | None:
        """The values that stay, as attention sees them: [B, H, S, D]; None before the first."""
        return self._seen(1)

    def _seen(self, i: int) -> Tensor | None:
        cache = self.cache
        if not self.is_initialized or not cache.seen:
            return None
        step = cache.begin_step(len(cache.seen), 0)
        cache.step = None
        if step.places is not None:
            raise UserError("rows of a cache lie in different places: select one to look at it")
        return self.placed(step)[i]

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.get_mask_sizes(query_length, self.layer_idx)

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.23
