"""Layers of a cache of fixed size, of any kind, and where they keep keys and values, each in a slot
of its own, and in which form: as attention reads them. `int8.py` has another form.

    slots   0 1 2 3 | 4 5 6 7 8 9        C = 9, 4 sinks
    tokens  0 1 2 3 | 10 11 6 7 8 9      token 11 was written over token 5, token 10 over token 4

Sinks lie in the first slots. The window is a ring behind them: each new entry is written over the
one that is evicted. Nothing else is written, and a full cache is read as it lies, since attention
does not ask in which order. A cache that fills has only the slots that it has used.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin

from kvalign.aligners.base import Birth
from kvalign.aligners.entries import KV, cat
from kvalign.cache.passes import Pass
from kvalign.cache.realigner import Realigner
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.models.wrapped import no_autograd_modes

_SHORTEST = 64

At = slice | Tensor
"""Positions of S entries: a slice, or [..., S] int64."""
ReadTensor = Callable[..., Tensor]
"""Of the name of a tensor of a saved state, its shape behind [B, H], its dtype and, unless it is to
be on the model's, a device: the tensor."""


class Form:
    """Form of stored keys and values: numbers of the model's dtype.

    Attributes:
        dtype: of entries as attention reads them.
        stored_dtype: of what is stored.
        names: of entries and sinks in a state.
        base: [H, 1, D] float32, what all keys are stored without; None: 0.
    """

    is_int8 = False
    names = ("entries", "sinks")
    base: Tensor | None = None

    @property
    def bases(self) -> Tensor | None:
        """The base as our kernel takes it, [H, D]."""
        return None if self.base is None else self.base[:, 0]

    def __init__(self, dtype: torch.dtype):
        self.dtype = self.stored_dtype = dtype

    def width(self, head_dim: int) -> int:
        """Stored numbers of a key or a value."""
        return head_dim

    @no_autograd_modes()
    def empty(self, like: Tensor, length: int) -> Tensor:
        """Room for so many entries beside one another, like these [..., S, D]."""
        shape = (*like.shape[:-2], length, self.width(like.shape[-1]))
        return like.new_zeros(shape, dtype=self.stored_dtype)

    def encode(self, x: Tensor) -> Tensor:
        """Keys or values [..., D] as they are stored, [..., width]; in floats they stay as they are
        and are cast where they are written.
        """
        return x

    def decode(self, stored: Tensor) -> Tensor:
        """Values, or keys without their base, [..., D] from what is stored: in floats a view."""
        return stored

    def encode_at(self, entries: KV, at: At) -> KV:
        """Entries [B, H, S, D] with keys at these positions, as they are stored."""
        return entries

    def decode_at(self, stored: KV, at: At) -> KV:
        """Entries [B, H, S, D] with keys at these positions, from what is stored."""
        return stored

    def without_position(self) -> Self:
        """Form of keys that have no position, where a position is not stored."""
        return self


class Part(ABC):
    """Part of a cache that has rows of a batch."""

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Keep these rows [B'], in this order."""

    @abstractmethod
    def join(self, others: Sequence[Any]) -> None:
        """Take over the rows of all these parts of the same kind."""


class Ring:
    """Slots of a layer; the pass of its cache says which of them count.

    Args:
        like: entries of the shape [B, H, ?, D], on the device of those to store.
        most: number of slots of a full cache.
        form: of the stored entries.

    Attributes:
        data: all slots, as they are stored: [B, H, S, width of the form].
    """

    def __init__(self, like: KV, most: int, form: Form):
        self.most, self.form = most, form
        self.data = like.map(lambda x: form.empty(x, 0))

    @property
    def num_slots(self) -> int:
        return self.data.keys.shape[2]

    def like(self) -> KV:
        """No entries, of the shape and dtype of those that attention gets: [B, H, 0, D]."""
        return self.data.slots(0, 0).map(self.form.decode)

    def grow(self, num: int) -> None:
        """Have at least so many slots, or all that there may be."""
        if self.num_slots < min(num, self.most):
            missing = min(self.most, max(2 * num, _SHORTEST)) - self.num_slots
            with no_autograd_modes():
                self.data = self.data.map(lambda x: pad(x, (0, 0, 0, missing)))

    @no_autograd_modes()
    def select(self, rows: Tensor) -> None:
        """Keep these rows [B'], in this order."""
        self.data = self.data.map(lambda x: x[rows.to(x.device)])

    @no_autograd_modes()
    def replace(self, stored: KV) -> None:
        """Have these slots only, given as they are stored, or before they are cast to that. They
        are the ring's own from now on.
        """
        stored = stored.map(lambda x: x.detach().to(self.data.keys.dtype))
        self.data = stored.map(lambda x: x.clone() if x.is_inference() else x)


class SinkKeys(Part):
    """Keys of the first entries, stacked over all layers, so that one rotation moves them.

    Attributes:
        by_device: [L, B, H, num_sinks, D]; a layer's keys are on its device.
    """

    def __init__(self, num_layers: int, num_sinks: int):
        self.num_layers, self.num_sinks = num_layers, num_sinks
        self.by_device: dict[torch.device, Tensor] = {}

    @no_autograd_modes()
    def make(self, like: Tensor) -> None:
        """Allocate the keys of layers like this one's [B, H, ?, D]."""
        if like.device not in self.by_device:
            one = like.new_zeros(*like.shape[:2], self.num_sinks, like.shape[3])
            self.by_device[like.device] = one.expand(self.num_layers, *one.shape).contiguous()

    def of(self, layer: int, device: torch.device) -> Tensor:
        """Keys of a layer, [B, H, num_sinks, D]."""
        return self.by_device[device][layer]

    def add(self, layer: int, step: Pass, keys: Tensor) -> None:
        """Add those of the sinks among new keys [B, H, T, D] of a layer."""
        own = self.of(layer, keys.device)
        for row, seen in enumerate(step.seen):
            num = min(step.num_new, self.num_sinks - seen)
            if num > 0:
                own[row, :, seen : seen + num] = keys[row, :, :num].detach()

    def reset(self) -> None:
        self.by_device.clear()

    @no_autograd_modes()
    def select(self, rows: Tensor) -> None:
        for device, keys in self.by_device.items():
            self.by_device[device] = keys[:, rows.to(device)]

    @no_autograd_modes()
    def join(self, others: Sequence["SinkKeys"]) -> None:
        devices = others[0].by_device
        self.by_device = {x: torch.cat([one.by_device[x] for one in others], 1) for x in devices}


class Owner(Protocol):
    """The cache as its layers know it (`base.py`)."""

    realigner: Realigner
    frame: CacheSizes
    seen: list[int]
    end: int
    step: Pass | None

    @property
    def num_stored(self) -> int: ...
    @property
    def rotates_sinks(self) -> bool: ...
    @property
    def reads_stored(self) -> bool: ...
    @property
    def angles(self) -> Tensor | None: ...
    def form(self, dtype: torch.dtype, layer_idx: int) -> Form: ...
    def enter(self, new: KV) -> None: ...
    def leave(self) -> None: ...
    def settle(self) -> Pass | None: ...
    def get_seq_length(self) -> int: ...
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]: ...


class StreamingLayer(CacheLayerMixin, Part):
    """Interface of every kind of layer: it takes new entries and gives attention all of them."""

    is_first = is_last = False
    """Whether it is the first, or the last, of the cache's layers that have entries."""

    def __init__(self, cache: Owner, layer_idx: int):
        self.cache, self.layer_idx, self.realigner = cache, layer_idx, cache.realigner
        self.reset()

    @property
    def cache(self) -> Owner:
        """The cache that it is a layer of. It does not hold it: when nobody else does, both go at
        once, and do not wait for the garbage collector.
        """
        cache = self._cache()
        assert cache is not None
        return cache

    @cache.setter
    def cache(self, cache: Owner) -> None:
        self._cache = weakref.ref(cache)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KV:
        """Take in [B, H, T, D]; return all entries for this pass's attention. UserError: not like
        those before.
        """
        new = KV(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(*new)
        elif (key_states.dtype, key_states.device) != (self.dtype, self.device):
            raise UserError(
                f"this stream's entries are {self.dtype} on {self.device}, but the model now "
                f"gives {key_states.dtype} on {key_states.device}: reset() the stream, or "
                "convert the model back and load a saved stream"
            )
        cache = self._cache()
        assert cache is not None
        if self.is_first or cache.step is None:
            cache.enter(new)
        assert cache.step is not None
        entries = self.take(cache.step, new)
        if self.is_last:
            cache.leave()
        return entries

    def reset(self) -> None:
        """Let go of all entries."""
        self.is_initialized = False

    @abstractmethod
    def begin(self, step: Pass, shifts: list[int]) -> None:
        """Evict entries, and move those of each row by `shifts` (empty: by none), to where a pass
        finds them.
        """

    @abstractmethod
    def take(self, step: Pass, new: KV) -> KV:
        """Keep new entries [B, H, T, D] of a pass; return all that its attention sees."""

    @abstractmethod
    def pieces(self, step: Pass) -> list[KV]:
        """The entries before a pass, as the pass sees them, in parts to concatenate."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Tensors of the layer, by name."""

    @abstractmethod
    def restore(self, read: ReadTensor, seen: list[int], head_dim: int, dtype: torch.dtype) -> None:
        """Restore `state` of rows that have been fed so many tokens."""

    def without_position(self, step: Pass, new: KV, realigner: Realigner | None = None) -> KV:
        """New entries as `anchor` of the realigner, the cache's or another, returns them; sinks
        stay unchanged.
        """
        anchor = (realigner or self.realigner).anchor
        num_sinks, evicting = step.sizes.num_sinks, step.evicting
        if step.is_decode and step.born is not None:  # the usual step
            where: Birth = step.position_ids[:, None]
            anchored = anchor(self.layer_idx, new, step.born, where, evicting)
            return anchored.map(lambda x: x.to(self.dtype))
        if step.is_single and not step.is_alike:
            # Rows take the place of entries.
            birth, at = (torch.tensor(x, device=self.device) for x in (step.births, step.positions))
            of_rows = evicting.T if isinstance(evicting, torch.Tensor) else evicting
            rows = new.map(_transposed)
            anchored = anchor(self.layer_idx, rows, birth, at, of_rows).map(_transposed)
            is_sink = torch.tensor(step.seen, device=self.device) < num_sinks
            return anchored.map(lambda x: x.to(self.dtype)).unless(is_sink, new)
        num_first = min(max(num_sinks - step.seen[0], 0), step.num_new)  # new sinks
        born, where = (
            x.to(self.device) if isinstance(x, Tensor) else x for x in step.written_at(num_first)
        )
        others = new.slots(num_first, step.num_new - num_first)
        later = evicting[:, num_first:] if isinstance(evicting, torch.Tensor) else evicting
        anchored = anchor(self.layer_idx, others, born, where, later)
        anchored = anchored.map(lambda x: x.to(self.dtype))
        return cat([new.slots(0, num_first), anchored]) if num_first else anchored

    @property
    def keys(self) -> Tensor | None:
        """The kept keys, as attention sees them: [B, H, S, D]; None before the first."""
        return self._read_entries()[0]

    @property
    def values(self) -> Tensor | None:
        """The kept values, as attention sees them: [B, H, S, D]; None before the first."""
        return self._read_entries()[1]

    def _read_entries(self) -> KV | tuple[None, None]:
        step = self.cache.settle()
        if step is None or not self.is_initialized:
            return None, None
        if not step.is_alike:
            raise UserError("the rows of this cache differ: select one to see its entries")
        return cat(self.pieces(step))

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.get_mask_sizes(query_length, self.layer_idx)

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.23


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, 2)
