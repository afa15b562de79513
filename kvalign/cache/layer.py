"""Layer of a cache of fixed size, of any kind."""

import weakref
from abc import abstractmethod
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvalign.aligners.base import Birth
from kvalign.aligners.entries import KV, cat
from kvalign.cache.form import Form, ReadTensor
from kvalign.cache.realigner import Realigner
from kvalign.cache.ring import Part
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.step import Step
from kvalign.foundation.errors import UserError


class Owner(Protocol):
    """The cache as its layers know it (`base.py`)."""

    realigner: Realigner
    frame: CacheSizes
    seen: list[int]
    end: int
    step: Step | None

    @property
    def num_stored(self) -> int: ...
    @property
    def rotates_sinks(self) -> bool: ...
    def form(self, dtype: torch.dtype, layer_idx: int) -> Form: ...
    def enter(self, new: KV) -> None: ...
    def leave(self) -> None: ...
    def settle(self) -> Step | None: ...
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
        """Take in [B, H, T, D]; return all entries for this pass's attention."""
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
    def take(self, step: Step, new: KV) -> KV:
        """Keep new entries [B, H, T, D] of a pass; return all that its attention sees."""

    @abstractmethod
    def pieces(self, step: Step) -> list[KV]:
        """The entries before a pass, as the pass sees them, in parts to concatenate."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Tensors of the layer, by name."""

    @abstractmethod
    def restore(self, read: ReadTensor, seen: list[int], head_dim: int, dtype: torch.dtype) -> None:
        """Restore `state` of rows that have been fed so many tokens."""

    def without_position(self, step: Step, new: KV, realigner: Realigner | None = None) -> KV:
        """New entries as `anchor` of the realigner, the cache's or another, returns them; sinks
        stay unchanged.
        """
        anchor = (realigner or self.realigner).anchor
        num_sinks, segment, evicting = step.sizes.num_sinks, step.segment, step.evicting
        if not step.is_alike and step.num_new == 1:
            # One token a row: rows take the place of entries.
            birth, at = (torch.tensor(x, device=self.device) for x in (step.births, step.positions))
            of_rows = evicting.T if isinstance(evicting, torch.Tensor) else evicting
            rows = new.map(_transposed)
            anchored = anchor(self.layer_idx, rows, birth, at, of_rows).map(_transposed)
            is_sink = torch.tensor(step.seen, device=self.device) < num_sinks
            return anchored.map(lambda x: x.to(self.dtype)).unless(is_sink, new)
        num_first = min(max(num_sinks - step.seen[0], 0), step.num_new)  # new sinks
        born: Birth = slice(step.births[0] + num_first, step.births[0] + step.num_new)
        where: Birth = slice(step.positions[0] + num_first, step.positions[0] + step.num_new)
        if segment is not None:
            born, where = segment.birth[num_first:], segment.at[num_first:]
        elif len(set(step.positions)) > 1:  # one token a row: rotary positions have run on
            where = torch.tensor(step.positions, device=self.device)[:, None, None]
        others = new.slots(num_first, step.num_new - num_first)
        later = evicting[:, num_first:] if isinstance(evicting, torch.Tensor) else evicting
        anchored = anchor(self.layer_idx, others, born, where, later)
        return cat([new.slots(0, num_first), anchored.map(lambda x: x.to(self.dtype))])

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
