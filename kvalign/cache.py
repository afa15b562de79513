"""The streaming cache: attention sinks and a window of fixed size, written once and never moved.

     places  0 1 2 3 | 4 5 6 ... C-1      C entries are kept between two steps
             sinks   | window

A step hands in the key and value of the new token. Attention gets all C + 1 entries, one slice of a
sliding buffer; before the next step the `num_evicted` oldest of the window are left out of it and
the sinks written in front again. The model needs no hook and no patch: it asks the cache for its
next position, which stays in range however long the stream is.

Rows of a batch are independent: each has its own length, right-aligned in the buffer, so that a
step writes all rows at one place. What a row lacks on the left is masked until it is full.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kvalign.aligners import Move
from kvalign.aligners.base import Birth, KeysValues
from kvalign.attention import install, mark
from kvalign.buffer import SlidingBuffer
from kvalign.errors import UserError
from kvalign.models import ModelSpec, spec_of
from kvalign.realign import OnRead, Realigner
from kvalign.relative import Segment, read_step
from kvalign.sizes import CacheSizes

SLACK = 4  # a buffer has room for another 1 / SLACK of its entries


@dataclass
class Step:
    """What one forward pass adds, and where; the same for all layers.

    Attributes:
        seen: tokens of each row before.
        stored: entries of each row before.
        behind: by how much each row's positions have run on.
        positions: where each row's first new token is computed.
    """

    sizes: CacheSizes
    realigner: Realigner | None
    num_new: int
    seen: list[int]
    stored: list[int]
    behind: list[int]
    positions: list[int]

    def __post_init__(self) -> None:
        self.num_visible = max(self.stored, default=0) + self.num_new
        self.is_even = len(set(self.stored)) <= 1
        # Positions of a rotary model run on without meaning; elsewhere they are places.
        rotates = self.realigner is not None and self.realigner.rotation is not None
        self.births = self.stored if rotates else self.positions
        self.first_place = self.sizes.num_sinks
        self.places: Tensor | None = None
        if not self.is_even or len(set(self.births)) > 1:
            missing = self.num_visible - self.num_new - torch.tensor(self.stored)
            rank = torch.arange(self.num_visible) - missing[:, None]
            run_on = torch.tensor(self.births) - torch.tensor(self.stored)
            self.visible, self.inside = rank >= 0, rank >= self.sizes.num_sinks
            self.places = (rank + run_on[:, None]) * self.inside
        elif self.births:
            self.first_place += self.births[0] - self.stored[0]

    def per_row(self, numbers: list[int]) -> int | Tensor:
        """One number if all rows have the same, else [B, 1, 1]."""
        return numbers[0] if len(set(numbers)) == 1 else torch.tensor(numbers)[:, None, None]


class StreamingCache(Cache):
    """A `Cache` of fixed size: pass it as `past_key_values`, with neither mask nor position ids.

    Args:
        spec: the model, from `kvalign.models.spec_of(model.config)`.
        sizes: how many entries it keeps and drops, and when those that stay are moved.
        realigner: what keeps the entries that stay right; None leaves them unchanged.

    Attributes:
        seen: tokens that each row has been fed.

    Raises:
        UserError: more entries than the model has positions for.
    """

    def __init__(self, spec: ModelSpec, sizes: CacheSizes, realigner: Realigner | None = None):
        sizes.check_fits(spec)
        self.sizes, self.realigner = sizes, realigner
        self.frame = realigner.frame(sizes, spec.context_len) if realigner else sizes
        self.segment: Segment | None = None
        self.step: Step | None = None
        self._forget()
        super().__init__(layers=[StreamingLayer(self, i) for i in range(spec.num_layers)])

    def _forget(self) -> None:
        self.seen: list[int] = []
        self._moved: list[int] = []  # places by which the entries of each row have been moved
        self._sink_keys: list[tuple[list[StreamingLayer], Tensor]] = []  # by device, [L, B, H, S, D]
        self.step = None

    @property
    def num_stored(self) -> int:
        """Entries that the next token finds, of the longest row."""
        return max((self.sizes.num_stored(n) for n in self.seen), default=0)

    @property
    def num_evictions(self) -> int:
        """Times that the longest row has dropped anything."""
        return self.sizes.num_dropped(max(self.seen, default=0)) // self.sizes.num_evicted

    def index(self, row: int = 0) -> Tensor:
        """Of a row's entries, the places of their tokens in the stream, counted from 0: [S]."""
        seen = self.seen[row] if self.seen else 0
        tokens, dropped = torch.arange(seen), self.sizes.num_dropped(seen)
        first = self.sizes.num_sinks
        return tokens if not dropped else torch.cat([tokens[:first], tokens[first + dropped :]])

    def positions(self) -> list[int]:
        """The position of each row's next token."""
        return [n - self.frame.num_moved(n) for n in self.seen]

    def row_inputs(self, device: torch.device, of_model: str) -> dict[str, Tensor]:
        """What a model must be told to take a token of rows of unequal lengths; nothing if the
        rows are alike.
        """
        positions, stored = self.positions(), [self.sizes.num_stored(n) for n in self.seen]
        told: dict[str, Tensor] = {}
        if len(set(positions)) > 1:
            told["position_ids"] = torch.tensor(positions, device=device)[:, None]
        if len(set(stored)) > 1:
            width = max(stored) + 1
            missing = width - 1 - torch.tensor(stored, device=device)
            visible = torch.arange(width, device=device) >= missing[:, None]
            if of_model == "bloom":  # counts positions from its mask
                told["attention_mask"] = visible.long()
            else:  # mpt: True hides
                told["attention_mask"] = (visible ^ (of_model == "mpt"))[:, None, None]
            told.setdefault("position_ids", torch.tensor(positions, device=device)[:, None])
        return told

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The position of the next token: transformers asks before each step."""
        return max(self.positions(), default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.num_stored + query_length, self.get_seq_length() - self.num_stored

    def begin_step(self, num_rows: int, num_new: int) -> Step:
        """Bring all entries to where the next tokens find them."""
        if not self.seen:
            self.seen, self._moved = [0] * num_rows, [0] * num_rows
        if num_rows != len(self.seen):
            raise UserError(f"this cache has {len(self.seen)} rows, got ids of {num_rows}")
        if num_new > 1 and len(set(self.seen)) > 1:
            raise UserError(f"rows of unequal length take one token each, got {num_new}")
        step = Step(
            sizes=self.sizes,
            realigner=self.realigner,
            num_new=num_new,
            seen=self.seen,
            stored=[self.sizes.num_stored(n) for n in self.seen],
            behind=[self.frame.num_behind(n) for n in self.seen],
            positions=self.positions(),
        )
        self._settle(step)
        self.step = step
        return step

    def end_step(self) -> None:
        assert self.step is not None
        self.seen = [n + self.step.num_new for n in self.step.seen]
        self.step = None

    def settle(self) -> None:
        """Bring all entries to where the next token finds them, without a next token."""
        if self.seen and self.step is None:
            self.begin_step(len(self.seen), 0)
            self.step = None

    def _settle(self, step: Step) -> None:
        if max(step.seen) == 0:
            return
        moved = [self.frame.num_moved(n) for n in step.seen]
        shifts = [now - before for now, before in zip(moved, self._moved, strict=True)]
        self._moved = moved
        if any(shifts):
            for layer in self.layers:
                layer.move(step, shifts)
        if step.num_new == 1:
            for layer in self.layers:
                for buffer in layer.buffers:
                    buffer.make_room(max(step.stored), 1, buffer.data)
        if self.sizes.num_sinks and any(map(self.sizes.num_dropped, step.seen)):
            self._write_sinks(step)

    def _write_sinks(self, step: Step) -> None:
        """Put the sinks in front of the window again, turned to follow it."""
        rotation = self.realigner.rotation if self.realigner else None
        if rotation is None:
            for layer in self.layers:
                layer.write_sinks(step, layer.sinks[0])
            return
        if not self._sink_keys:
            for device in {layer.device for layer in self.layers}:
                layers = [layer for layer in self.layers if layer.device == device]
                self._sink_keys.append((layers, torch.stack([x.sinks[0] for x in layers])))
        back = step.per_row([-n for n in step.behind])
        for layers, keys in self._sink_keys:
            for layer, turned in zip(layers, rotation.shift(keys, back), strict=True):
                layer.write_sinks(step, turned)

    def reset(self) -> None:
        """Forget everything: the next token is the first of a new stream."""
        self._forget()
        for layer in self.layers:
            layer.reset()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise UserError("a streaming cache cannot be cropped: the entries it evicted are gone")

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; one may come several times."""
        if not self.seen:
            return
        self.settle()
        self.seen, self._moved = ([x[row] for row in rows] for x in (self.seen, self._moved))
        self._sink_keys = []
        for layer in self.layers:
            layer.select(torch.tensor(rows))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select([row for row in range(len(self.seen)) for _ in range(repeats)])

    def join(self, others: Sequence["StreamingCache"]) -> None:
        """Add the rows of caches made alike, each fed something, after those that are here."""
        caches = [cache for cache in (self, *others) if cache.seen]
        if caches == [self] or not caches:
            return
        for cache in caches:
            cache.settle()
        width = max(cache.num_stored for cache in caches)
        for i, layer in enumerate(self.layers):
            layer.join([cache.layers[i] for cache in caches], width)
        self.seen, self._moved = (
            [x for cache in caches for x in getattr(cache, name)] for name in ("seen", "_moved")
        )
        self._sink_keys = []

    def state(self) -> dict[str, Tensor]:
        """All that it holds, by name; `restore` of a cache made alike goes on with it."""
        if not self.seen:
            return {}
        self.settle()
        tensors = {"seen": torch.tensor(self.seen)}
        for i, layer in enumerate(self.layers):
            held = {"entries": [x.last(self.num_stored) for x in layer.entries]}
            held["sinks"] = layer.sinks
            if layer.sources is not layer.entries:
                held["sources"] = [x.last(self.num_stored) for x in layer.sources]
            for name, pair in held.items():
                tensors |= {f"{i}.{name}.{j}": x for j, x in enumerate(pair)}
        return tensors

    def restore(self, state: dict[str, Tensor], model: PreTrainedModel) -> None:
        """Take up what `state` gave; UserError if it does not fit this cache or this model."""
        self.reset()
        if not state:
            return
        num_rows = state["seen"].numel() if "seen" in state else 0
        seen = expect_tensor(state, "seen", (num_rows,), torch.int64).tolist()
        if not all(0 < n < 2**62 for n in seen) or not seen:
            raise UserError("a stream's rows must have seen a token at least")
        spec, width = spec_of(model.config), max(map(self.sizes.num_stored, seen))

        def read(name: str, length: int, dtype: torch.dtype) -> list[Tensor]:
            shape = (num_rows, spec.num_kv_heads, length, spec.head_dim)
            return [
                expect_tensor(state, f"{name}.{j}", shape, dtype).to(model.device) for j in range(2)
            ]

        for i, layer in enumerate(self.layers):
            entries = read(f"{i}.entries", width, model.dtype)
            layer.lazy_initialization(*entries)
            layer.sinks = read(f"{i}.sinks", self.sizes.num_sinks, model.dtype)
            pairs = [(layer.entries, entries)]
            if layer.sources is not layer.entries:
                sources = read(f"{i}.sources", width, layer.source_dtype)
                pairs.append((layer.sources, sources))
            for buffers, tensors in pairs:
                for buffer, tensor in zip(buffers, tensors, strict=True):
                    buffer.replace(tensor)
        self.seen, self._moved = seen, [self.frame.num_moved(n) for n in seen]


class StreamingLayer(CacheLayerMixin):
    """One layer of the cache.

    Attributes:
        entries: buffers of keys and values, as attention gets them.
        sources: what a realigner that moves entries places them from: the same buffers where it
            starts from its last output in the model's precision, empty where nothing moves.
        sinks: the first keys and values [B, H, num_sinks, D], as they were computed.
    """

    def __init__(self, cache: StreamingCache, layer_idx: int):
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
        most = cache.sizes.cache_size + 1
        slack = max(1, most // SLACK)
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
    def buffers(self) -> list[SlidingBuffer]:
        return self.entries if self.sources is self.entries else [*self.entries, *self.sources]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> KeysValues:
        """Take in [B, H, T, D]; return all entries for this step's attention."""
        new, cache = (key_states, value_states), self.cache
        if not self.is_initialized:
            self.lazy_initialization(*new)
        step = cache.step or cache.begin_step(len(key_states), key_states.shape[2])
        self._add_sinks(step, new)
        stored = self._stored_form(step, new)
        if cache.segment is not None:
            seen_sinks = min(self.cache.sizes.num_sinks, step.seen[0])
            window = step.stored[0] - seen_sinks
            found = [
                torch.cat([sinks[:, :, :seen_sinks], *([buffer.last(window)] if window else []), x], 2)
                for sinks, buffer, x in zip(self.sinks, self.entries, stored, strict=True)
            ]
            mark(found[0], partial(cache.segment.attend, self.layer_idx))
        elif step.num_new > 1:
            found = [torch.cat(pair, 2) for pair in zip(self.placed(step), new, strict=True)]
        self._write(step, stored, new)
        if cache.segment is None and step.num_new == 1:
            found = [buffer.last(step.num_visible) for buffer in self.entries]
            if isinstance(cache.realigner, OnRead):
                install(cache.realigner.config)
                mark(found[0], partial(read_step, step, self.layer_idx))
        if self.layer_idx == len(cache.layers) - 1:
            cache.end_step()
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
        placed = realigner.read(self.layer_idx, *window, now, at)
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
            if realigner.recursive and self.sources is not self.entries:
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
        for row, seen in enumerate(step.seen):
            num = min(step.num_new, num_sinks - seen)
            if num > 0:
                for sinks, x in zip(self.sinks, new, strict=True):
                    sinks[row, :, seen : seen + num] = x[row, :, :num].detach()

    def _stored_form(self, step: Step, new: KeysValues) -> KeysValues:
        """New entries as the buffers hold them: sinks as they are, others as `OnRead` anchors."""
        realigner, first = self.cache.realigner, step.sizes.num_sinks
        if not isinstance(realigner, OnRead):
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
            birth, at = segment.birth[skip:], segment.position[skip:]
        elif len(set(step.positions)) == len(set(step.births)) == 1:
            birth, at = (
                slice(x[0] + skip, x[0] + step.num_new) for x in (step.births, step.positions)
            )
        else:  # one token a row: rows take the place of slots
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
        if self.sources and self.sources is not self.entries:
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
        cache.begin_step(len(cache.seen), 0)
        step, cache.step = cache.step, None
        assert step is not None
        return self.placed(step)[i]

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.get_mask_sizes(query_length, self.layer_idx)

    def get_max_length(self) -> int:
        return -1


def expect_tensor(
    state: dict[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """A tensor of a state; UserError unless it is there with this shape and dtype."""
    tensor = state.get(name)
    if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
        what = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
        raise UserError(f"a stream's {name} must be {shape} {dtype}, found {what}")
    return tensor
