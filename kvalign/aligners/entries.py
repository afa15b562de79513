"""Entries of a layer: keys and values of the same tokens, in one pair wherever they are."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class KV(NamedTuple):
    """Keys and values of the same entries, [B, H, S, D] each."""

    keys: Tensor
    values: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "KV":
        return KV(function(self.keys), function(self.values))

    def slots(self, start: int, num: int) -> "KV":
        return KV(self.keys.narrow(2, start, num), self.values.narrow(2, start, num))

    def put(self, new: "KV") -> None:
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

    def rows(self, rows: slice | list[int] | Tensor) -> "KV":
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


def cat(parts: Iterable[tuple[Tensor, Tensor]], dim: int = 2) -> KV:
    """Concatenation of entries [B, H, S, D]; with another dim of their rows (0) or layers."""
    keys, values = zip(*parts, strict=True)
    return KV(torch.cat(keys, dim), torch.cat(values, dim))
