"""Keys and values of a layer, each in a slot of its own.

    slots   0 1 2 3 | 4 5 6 7 8 9        C = 9, 4 sinks
    tokens  0 1 2 3 | 10 11 6 7 8 9      token 11 was written over token 5, token 10 over token 4

Sinks lie in the first slots. The window is a ring behind them: each new entry is written over the
one that is evicted. Nothing else is written, and a full cache is read as it lies, since attention
does not ask in which order. A cache that fills has only the slots that it has used.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvalign.cache.form import Form
from kvalign.foundation.autograd import no_autograd_modes

_SHORTEST = 64


class KV(NamedTuple):
    """Keys and values of the same entries, [B, H, S, D] each."""

    keys: Tensor
    values: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "KV":
        return KV(function(self.keys), function(self.values))

    def slots(self, start: int, num: int) -> "KV":
        """View of so many of the entries."""
        return KV(self.keys.narrow(2, start, num), self.values.narrow(2, start, num))

    def put(self, new: "KV") -> None:
        """Overwrite the entries with as many others."""
        for x, y in zip(self, new, strict=True):
            x.copy_(y.detach())

    def put_at(self, slots: Tensor, new: "KV") -> None:
        """Overwrite the entries of some slots: [T], the same in all rows, or [B, 1]."""
        write(*self, slots, *new)

    def at(self, slots: Tensor | slice) -> "KV":
        """Entries of some slots: a slice, [T] or, if those of rows differ, [B, T]."""
        if isinstance(slots, slice):
            return self.map(lambda x: x[:, :, slots])
        if slots.dim() == 1:
            return self.map(lambda x: x.index_select(2, slots))
        index = slots[:, None, :, None]
        return self.map(lambda x: x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])))

    def rows(self, rows: slice | Tensor) -> "KV":
        """Entries of some rows of the batch."""
        return KV(self.keys[rows], self.values[rows])

    def unless(self, is_other: Tensor, other: "KV") -> "KV":
        """Return the entries with some rows, [B] bool, replaced by those of another."""
        rows = is_other[:, None, None, None]
        return KV(*(torch.where(rows, x, y) for x, y in zip(other, self, strict=True)))

    def padded(self, width: int) -> "KV":
        """Entries padded to `width` with zeros in front."""
        missing = width - self.keys.shape[2]
        return self.map(lambda x: pad(x, (0, 0, missing, 0)))


def write(
    keys: Tensor, values: Tensor, slots: Tensor, new_keys: Tensor, new_values: Tensor
) -> None:
    """Overwrite the entries of some slots, as of `KV.put_at`."""
    for x, y in ((keys, new_keys), (values, new_values)):
        y = y.detach().to(x.dtype)
        if slots.dim() == 1:
            x.index_copy_(2, slots, y)
        else:
            x.scatter_(2, slots[:, None, :, None].expand_as(y), y)


class Part(ABC):
    """Part of a cache that has rows of a batch."""

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Keep these rows [B'], in this order."""

    @abstractmethod
    def join(self, others: Sequence[Any]) -> None:
        """Take over the rows of all these parts of the same kind."""


def cat(parts: Iterable[tuple[Tensor, Tensor]], dim: int = 2) -> KV:
    """Concatenation of entries; with another dim of their rows (0) or layers."""
    keys, values = zip(*parts, strict=True)
    return KV(torch.cat(keys, dim), torch.cat(values, dim))


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

    def grow(self, num: int) -> None:
        """Have at least so many slots, or all that there may be."""
        if self.num_slots < min(num, self.most):
            self._lengthen(min(self.most, max(2 * num, _SHORTEST)))

    @no_autograd_modes()
    def _lengthen(self, num: int) -> None:
        missing = num - self.num_slots
        self.data = self.data.map(lambda x: pad(x, (0, 0, 0, missing)))

    @no_autograd_modes()
    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        self.data = self.data.map(lambda x: x[rows.to(x.device)])

    @no_autograd_modes()
    def replace(self, stored: KV) -> None:
        """Have these slots only, given as they are stored."""
        self.data = stored.map(lambda x: x.detach().clone(memory_format=torch.contiguous_format))
