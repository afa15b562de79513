"""The streaming cache: attention sinks and a window, evicting and realigning inside `update()`.

     slots   0 1 2 3 | 4 5 6 ... C-1      C entries are stored between two steps
             sinks   | window

A step hands in the key and value of the new token. Attention gets all C + 1 entries; then the
`num_evicted` entries right after the sinks are dropped, the later ones move towards the start and
are realigned. The model needs no hook and no patch: it asks the cache for its length and so tells
each token its position inside the cache (0..C), never its position in the stream.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvalign.aligners import Move
from kvalign.errors import UserError
from kvalign.models import ModelSpec, spec_of
from kvalign.realign import Realigner
from kvalign.sizes import CacheSizes


class StreamingCache(Cache):
    """A `Cache` of fixed size: pass it as `past_key_values`, with neither mask nor position ids.

    Args:
        spec: the model, from `kvalign.models.spec_of(model.config)`.
        sizes: how many entries it keeps and drops.
        realigner: moves the entries that stay after an eviction; None leaves them unchanged.

    Raises:
        UserError: more entries than the model has positions for.
    """

    def __init__(self, spec: ModelSpec, sizes: CacheSizes, realigner: Realigner | None = None):
        sizes.check_fits(spec)
        self.slots = Slots(sizes)
        self.realigner = realigner
        super().__init__(
            layers=[StreamingLayer(self.slots, i, realigner) for i in range(spec.num_layers)]
        )

    def reset(self) -> None:
        """Forget everything: the next token is the first of a new stream."""
        super().reset()
        self.slots.clear()

    def state(self) -> dict[str, Tensor]:
        """All that it holds, by name; `restore` of a cache made alike goes on with it."""
        sources = {
            f"{i}.kept.{j}": buffer.entries
            for i, layer in enumerate(self.layers)
            for j, buffer in enumerate(layer.sources)
        }
        return self.slots.state() | entries_of(self) | sources

    def restore(self, state: dict[str, Tensor], model: PreTrainedModel) -> None:
        """Take up what `state` gave.

        Raises:
            UserError: it does not fit this cache or this model.
        """
        self.reset()
        if not state:
            return
        self.slots.restore(state)
        num_after_sinks = max(0, len(self.slots) - self.slots.sizes.num_sinks)
        for i, (keys, values) in enumerate(read_entries(state, model, len(self.slots))):
            layer = self.layers[i]
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if self.realigner is not None:
                dtype = torch.float32 if self.realigner.recursive else keys.dtype
                shape = (*keys.shape[:2], num_after_sinks, keys.shape[3])
                layer.sources = [
                    SlidingBuffer(
                        expect_tensor(state, f"{i}.kept.{j}", shape, dtype).to(keys.device)
                    )
                    for j in range(2)
                ]


class Slots:
    """Which entry lies in which slot; shared by all layers, advanced by the first.

    Attributes:
        sizes: of the cache.
        birth: [S] int64, the position at which the entry in each slot was computed.
        index: [S] int64, its place in the stream, counted from 0.
        evicted: entries dropped by the last update.
        num_evictions: times that anything was dropped.
    """

    def __init__(self, sizes: CacheSizes):
        self.sizes = sizes
        self.clear()

    def clear(self) -> None:
        self.birth = self.index = torch.empty(0, dtype=torch.int64)
        self.evicted = self.num_evictions = self.num_seen = 0
        self._moves: dict[torch.device, Move] = {}

    def __len__(self) -> int:
        return len(self.birth)

    def state(self) -> dict[str, Tensor]:
        counts = torch.tensor([self.num_seen, self.num_evictions])
        return {"born": self.birth, "index": self.index, "counts": counts} if len(self) else {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Raises UserError if it is not of slots of this size."""
        self.clear()
        length = len(state["born"]) if "born" in state else 0
        birth, index = (
            expect_tensor(state, name, (length,), torch.int64) for name in ("born", "index")
        )
        num_seen, num_evictions = expect_tensor(state, "counts", (2,), torch.int64).tolist()
        if not (
            0 < length <= self.sizes.cache_size
            and (index.diff() > 0).all()
            and 0 <= index[0] <= index[-1] == num_seen - 1
            and ((birth >= 0) & (birth <= index)).all()
        ):
            raise UserError(
                f"a stream's slots must be up to {self.sizes.cache_size} in their order"
            )
        self.birth, self.index = birth, index
        self.num_seen, self.num_evictions = num_seen, num_evictions

    def append(self, num_new: int) -> None:
        """Place new entries after the last; drop what exceeds the cache, `num_evicted` at once."""
        birth = torch.cat([self.birth, torch.arange(len(self), len(self) + num_new)])
        index = torch.cat([self.index, torch.arange(self.num_seen, self.num_seen + num_new)])
        self.num_seen += num_new
        self.evicted = self.sizes.num_dropped(len(birth))
        self.num_evictions += self.evicted > 0
        self.birth, self.index = self.drop(birth, 0), self.drop(index, 0)
        self._moves.clear()

    def drop(self, x: Tensor, dim: int) -> Tensor:
        """Drop the entries evicted last from a tensor that has one place a slot along `dim`."""
        if not self.evicted:
            return x
        first, end = self.sizes.num_sinks, self.sizes.num_sinks + self.evicted
        length = x.shape[dim]
        return torch.cat([x.narrow(dim, 0, first), x.narrow(dim, end, length - end)], dim)

    def last_move(self, device: torch.device) -> Move:
        """The last eviction as the realigner needs it; made once for all layers on a device."""
        if device not in self._moves:
            first = self.sizes.num_sinks
            now = torch.arange(first, len(self), device=device)
            self._moves[device] = Move(self.evicted, first, now)
        return self._moves[device]


class SlidingBuffer:
    """Entries [B, H, S, D] appended at the end and dropped at the front, seldom copied."""

    def __init__(self, entries: Tensor):
        self.buffer, self.first, self.end = entries, 0, entries.shape[2]

    @property
    def entries(self) -> Tensor:
        return self.buffer[:, :, self.first : self.end]

    def append(self, new: Tensor) -> None:
        old, num_new = self.entries, new.shape[2]
        if self.end + num_new > self.buffer.shape[2]:
            length = old.shape[2]
            shape = (*old.shape[:2], length + num_new + length // 4, old.shape[3])
            self.buffer, self.first, self.end = old.new_empty(shape), 0, length
            self.buffer[:, :, :length] = old
        self.buffer[:, :, self.end : self.end + num_new] = new
        self.end += num_new

    def drop(self, num_first: int) -> None:
        self.first += num_first


class StreamingLayer(DynamicLayer):
    """One layer of the cache. `keys` and `values` [B, H, S, D] are what attention sees.

    With a realigner, `sources` holds what it computes the placed entries from, those of the sinks
    left out: what `anchor` returned when they were new, in the model's precision, or its own last
    output in float32, so that rounding errors do not add up in half precision.
    """

    is_croppable = False
    keys: Tensor
    values: Tensor

    def __init__(self, slots: Slots, layer_idx: int, realigner: Realigner | None):
        super().__init__()
        self.slots, self.layer_idx, self.realigner = slots, layer_idx, realigner
        self.sources: list[SlidingBuffer] = []  # of keys and of values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in [B, H, T, D]; return all entries for this step's attention, store what stays."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.layer_idx == 0:
            self.slots.append(key_states.shape[2])
        keys = torch.cat([self.keys, key_states], 2)
        values = torch.cat([self.values, value_states], 2)
        if self.realigner is None:
            self.keys, self.values = self.slots.drop(keys, 2), self.slots.drop(values, 2)
        else:
            self._add_sources(self.realigner, key_states, value_states)
            self.keys, self.values = self._placed(self.realigner, keys, values)
        return keys, values

    def _add_sources(self, realigner: Realigner, keys: Tensor, values: Tensor) -> None:
        """Add new entries to `sources`, less the sinks among them."""
        stored, num_new = self.get_seq_length(), keys.shape[2]
        first = min(max(stored, self.slots.sizes.num_sinks), stored + num_new)
        birth = slice(first, stored + num_new)
        dtype = torch.float32 if realigner.recursive else self.dtype
        new = realigner.anchor(
            self.layer_idx, keys[:, :, first - stored :], values[:, :, first - stored :], birth
        )
        for i, entries in enumerate(new):
            if len(self.sources) == i:
                self.sources.append(SlidingBuffer(entries.to(dtype)))
            else:
                self.sources[i].append(entries.to(dtype))

    def _placed(self, realigner: Realigner, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The entries that stay, placed anew if others were dropped."""
        evicted, num_sinks = self.slots.evicted, self.slots.sizes.num_sinks
        if not evicted:
            return keys, values
        for buffer in self.sources:
            buffer.drop(evicted)
        key_source, value_source = (buffer.entries for buffer in self.sources)
        move = self.slots.last_move(self.device)
        moved = realigner.place(self.layer_idx, key_source, value_source, move)
        if realigner.recursive:
            self.sources = [SlidingBuffer(x) for x in moved]
        if num_sinks:
            moved = (
                torch.cat([keys[:, :, :num_sinks], moved[0].to(self.dtype)], 2),
                torch.cat([values[:, :, :num_sinks], moved[1].to(self.dtype)], 2),
            )
        return moved[0].to(self.dtype), moved[1].to(self.dtype)

    def crop(self, tokens_to_remove: int) -> None:
        raise UserError("a streaming cache cannot be cropped: the entries it evicted are gone")

    def reset(self) -> None:
        # Dropped: transformers before 5.23 fills the entries with zeros and keeps their number.
        self.keys = self.values = None  # type: ignore[assignment]
        self.is_initialized = False
        self.sources = []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.get_seq_length() > 0:
            self._select_rows(torch.arange(self.keys.shape[0]).repeat_interleave(repeats))

    def _select_rows(self, rows: Tensor) -> None:
        if self.get_seq_length() == 0:
            return
        rows = rows.to(self.keys.device)
        self.keys, self.values = self.keys[rows], self.values[rows]
        self.sources = [SlidingBuffer(buffer.entries[rows]) for buffer in self.sources]


def entries_of(cache: Cache) -> dict[str, Tensor]:
    """Keys and values [B, H, S, D] of every layer, by name; nothing of an empty cache."""
    return {
        f"{i}.{name}": getattr(layer, name)
        for i, layer in enumerate(cache.layers)
        if layer.get_seq_length()
        for name in ("keys", "values")
    }


def read_entries(
    state: dict[str, Tensor], model: PreTrainedModel, num_entries: int
) -> list[tuple[Tensor, Tensor]]:
    """What `entries_of` gave: keys and values of each layer, on the model's device.

    Raises:
        UserError: they are not `num_entries` entries of such a model.
    """
    spec = spec_of(model.config)
    batch_size = len(state["0.keys"]) if "0.keys" in state else 0
    shape = (batch_size, spec.num_kv_heads, num_entries, spec.head_dim)
    layers = []
    for i in range(spec.num_layers):
        keys, values = (
            expect_tensor(state, f"{i}.{x}", shape, model.dtype) for x in ("keys", "values")
        )
        layers.append((keys.to(model.device), values.to(model.device)))
    return layers


def expect_tensor(
    state: dict[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """A tensor of a state; UserError unless it is there with this shape and dtype."""
    tensor = state.get(name)
    if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
        what = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
        raise UserError(f"a stream's {name} must be {shape} {dtype}, found {what}")
    return tensor
