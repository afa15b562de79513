"""The streaming cache: attention sinks and a window, evicting and realigning inside `update()`.

     slots   0 1 2 3 | 4 5 6 ... C-1      C entries are stored between two steps
             sinks   | window

A step hands in the key and value of the new token. Attention gets all C + 1 entries; then the
`num_evicted` entries right after the sinks are dropped, the later ones move towards the start and
are realigned. The model needs no hook and no patch: it asks the cache for its length and so tells
each token its position inside the cache (0..C), never its position in the stream.
"""

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvalign.models import ModelSpec, spec_of
from kvalign.realign import Move, Realigner


class StreamingCache(Cache):
    """A `Cache` of fixed size: pass it as `past_key_values`, with neither mask nor position ids.

    Args:
        spec: the model, from `kvalign.models.spec_of(model.config)`.
        cache_size: entries stored between steps, sinks included.
        num_sinks: first entries, never evicted.
        num_evicted: entries evicted at once when the cache is full.
        realigner: moves kept entries after an eviction; None leaves them as they are.

    Raises:
        ValueError: sizes that do not fit together or exceed the model's positions.
    """

    def __init__(
        self,
        spec: ModelSpec,
        cache_size: int,
        num_sinks: int = 4,
        num_evicted: int = 1,
        realigner: Realigner | None = None,
    ):
        check_sizes(spec, cache_size, num_sinks, num_evicted)
        self.slots = Slots(cache_size, num_sinks, num_evicted)
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
        kept = {
            f"{i}.kept.{j}": room.entries
            for i, layer in enumerate(self.layers)
            for j, room in enumerate(layer.kept)
        }
        return self.slots.state() | entries_of(self) | kept

    def restore(self, state: dict[str, Tensor], model: PreTrainedModel) -> None:
        """Take up what `state` gave.

        Raises:
            ValueError: it does not fit this cache or this model.
        """
        self.reset()
        if not state:
            return
        self.slots.restore(state)
        num_kept = max(0, len(self.slots) - self.slots.num_sinks)
        for i, (keys, values) in enumerate(read_entries(state, model, len(self.slots))):
            layer = self.layers[i]
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if self.realigner is not None:
                dtype = torch.float32 if self.realigner.recursive else keys.dtype
                shape = (*keys.shape[:2], num_kept, keys.shape[3])
                layer.kept = [
                    Room(named(state, f"{i}.kept.{j}", shape, dtype).to(keys.device))
                    for j in range(2)
                ]


class Slots:
    """Which entry lies in which slot; shared by all layers, advanced by the first.

    Attributes:
        born: [S] int64, the position that the entry in each slot had when it was computed.
        index: [S] int64, its place in the stream, counted from 0.
        evicted: entries dropped by the last update.
        num_evictions: times that anything was dropped.
    """

    def __init__(self, cache_size: int, num_sinks: int, num_evicted: int):
        self.cache_size, self.num_sinks, self.num_evicted = cache_size, num_sinks, num_evicted
        self.clear()

    def clear(self) -> None:
        self.born = self.index = torch.empty(0, dtype=torch.int64)
        self.evicted = self.num_evictions = self.num_seen = 0
        self._moves: dict[torch.device, Move] = {}

    def __len__(self) -> int:
        return len(self.born)

    def state(self) -> dict[str, Tensor]:
        counts = torch.tensor([self.num_seen, self.num_evictions])
        return {"born": self.born, "index": self.index, "counts": counts} if len(self) else {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Raises ValueError if it is not of slots of this size."""
        self.clear()
        length = len(state["born"]) if "born" in state else 0
        born, index = (named(state, name, (length,), torch.int64) for name in ("born", "index"))
        num_seen, num_evictions = named(state, "counts", (2,), torch.int64).tolist()
        if not (
            0 < length <= self.cache_size
            and (index.diff() > 0).all()
            and 0 <= index[0] <= index[-1] == num_seen - 1
            and ((born >= 0) & (born <= index)).all()
        ):
            raise ValueError(f"a stream's slots must be up to {self.cache_size} in their order")
        self.born, self.index = born, index
        self.num_seen, self.num_evictions = num_seen, num_evictions

    def append(self, num_new: int) -> None:
        """Place new entries after the last; drop what exceeds the cache, `num_evicted` at once."""
        born = torch.cat([self.born, torch.arange(len(self), len(self) + num_new)])
        index = torch.cat([self.index, torch.arange(self.num_seen, self.num_seen + num_new)])
        self.num_seen += num_new
        excess = len(born) - self.cache_size
        self.evicted = -(-excess // self.num_evicted) * self.num_evicted if excess > 0 else 0
        self.num_evictions += self.evicted > 0
        self.born, self.index = self.drop(born, 0), self.drop(index, 0)
        self._moves.clear()

    def drop(self, x: Tensor, dim: int) -> Tensor:
        """Drop the entries evicted last from a tensor that has one place a slot along `dim`."""
        if not self.evicted:
            return x
        first, end = self.num_sinks, self.num_sinks + self.evicted
        length = x.shape[dim]
        return torch.cat([x.narrow(dim, 0, first), x.narrow(dim, end, length - end)], dim)

    def last_move(self, device: torch.device) -> Move:
        """The last eviction as the realigner needs it; made once for all layers on a device."""
        if device not in self._moves:
            now = torch.arange(self.num_sinks, len(self), device=device)
            self._moves[device] = Move(self.evicted, self.num_sinks, now)
        return self._moves[device]


class Room:
    """Entries [B, H, S, D] that come at the end and go at the front; the rest is seldom copied."""

    def __init__(self, entries: Tensor):
        self.held, self.first, self.end = entries, 0, entries.shape[2]

    @property
    def entries(self) -> Tensor:
        return self.held[:, :, self.first : self.end]

    def append(self, new: Tensor) -> None:
        old, num_new = self.entries, new.shape[2]
        if self.end + num_new > self.held.shape[2]:
            length = old.shape[2]
            shape = (*old.shape[:2], length + num_new + length // 4, old.shape[3])
            self.held, self.first, self.end = old.new_empty(shape), 0, length
            self.held[:, :, :length] = old
        self.held[:, :, self.end : self.end + num_new] = new
        self.end += num_new

    def drop(self, num_first: int) -> None:
        self.first += num_first


class StreamingLayer(DynamicLayer):
    """One layer of the cache. `keys` and `values` [B, H, S, D] are what attention sees.

    With a realigner, `kept` holds what it places the entries after the sinks from: what it made of
    them when they were new, in the model's precision, or its own last output in float32, so that
    half precision does not add up rounding errors.
    """

    is_croppable = False
    keys: Tensor
    values: Tensor

    def __init__(self, slots: Slots, layer_idx: int, realigner: Realigner | None):
        super().__init__()
        self.slots, self.layer_idx, self.realigner = slots, layer_idx, realigner
        self.kept: list[Room] = []  # of keys and of values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
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
            self._keep(self.realigner, key_states, value_states)
            self.keys, self.values = self._placed(self.realigner, keys, values)
        return keys, values

    def _keep(self, realigner: Realigner, keys: Tensor, values: Tensor) -> None:
        """Add new entries to `kept`, less the sinks among them."""
        stored, num_new = self.get_seq_length(), keys.shape[2]
        first = min(max(stored, self.slots.num_sinks), stored + num_new)
        born = slice(first, stored + num_new)
        dtype = torch.float32 if realigner.recursive else self.dtype
        new = realigner.anchor(
            self.layer_idx, keys[:, :, first - stored :], values[:, :, first - stored :], born
        )
        for i, entries in enumerate(new):
            if len(self.kept) == i:
                self.kept.append(Room(entries.to(dtype)))
            else:
                self.kept[i].append(entries.to(dtype))

    def _placed(self, realigner: Realigner, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The entries that stay, placed anew if others were dropped."""
        evicted, num_sinks = self.slots.evicted, self.slots.num_sinks
        if not evicted:
            return keys, values
        for room in self.kept:
            room.drop(evicted)
        kept_keys, kept_values = (room.entries for room in self.kept)
        move = self.slots.last_move(self.device)
        moved = realigner.place(self.layer_idx, kept_keys, kept_values, move)
        if realigner.recursive:
            self.kept = [Room(x) for x in moved]
        if num_sinks:
            moved = (
                torch.cat([keys[:, :, :num_sinks], moved[0].to(self.dtype)], 2),
                torch.cat([values[:, :, :num_sinks], moved[1].to(self.dtype)], 2),
            )
        return moved[0].to(self.dtype), moved[1].to(self.dtype)

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("a streaming cache cannot be cropped: the entries it evicted are gone")

    def reset(self) -> None:
        # Dropped: transformers before 5.23 fills the entries with zeros and keeps their number.
        self.keys = self.values = None  # type: ignore[assignment]
        self.is_initialized = False
        self.kept = []

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
        self.kept = [Room(room.entries[rows]) for room in self.kept]


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
        ValueError: they are not `num_entries` entries of such a model.
    """
    spec = spec_of(model.config)
    batch_size = len(state["0.keys"]) if "0.keys" in state else 0
    shape = (batch_size, spec.num_kv_heads, num_entries, spec.head_dim)
    layers = []
    for i in range(spec.num_layers):
        keys, values = (named(state, f"{i}.{x}", shape, model.dtype) for x in ("keys", "values"))
        layers.append((keys.to(model.device), values.to(model.device)))
    return layers


def named(
    state: dict[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """A tensor of a state; ValueError unless it is there with this shape and dtype."""
    found = state.get(name)
    if found is None or found.shape != shape or found.dtype != dtype:
        what = "nothing" if found is None else f"{tuple(found.shape)} {found.dtype}"
        raise ValueError(f"a stream's {name} must be {shape} {dtype}, found {what}")
    return found


def check_sizes(spec: ModelSpec, cache_size: int, num_sinks: int, num_evicted: int) -> None:
    """Raise ValueError unless the sizes fit together and the model has enough positions."""
    if num_sinks < 0:
        raise ValueError(f"num_sinks must be at least 0, got {num_sinks}")
    if cache_size <= num_sinks:
        raise ValueError(
            f"cache_size must be above num_sinks ({num_sinks}) to leave room for a window, got "
            f"{cache_size}"
        )
    if not 1 <= num_evicted <= cache_size - num_sinks:
        raise ValueError(
            f"num_evicted must be between 1 and the window ({cache_size - num_sinks} = cache_size "
            f"{cache_size} less num_sinks {num_sinks}), got {num_evicted}"
        )
    if spec.context_len is not None and cache_size >= spec.context_len:
        raise ValueError(
            f"cache_size must be at most {spec.context_len - 1} for {spec.name} (its context "
            f"length less the new token), got {cache_size}"
        )
