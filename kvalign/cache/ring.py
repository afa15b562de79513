"""Keys and values in a sliding buffer: in the order of time, written once and read as one slice.

    [ . . . 5 6 7 8 9 . . . ]     appended at `end`, dropped by reading fewer of them
            ^ view    ^ end

When `end` reaches the end of the buffer, the kept entries are copied to its start: C entries every
C / 4 steps instead of at each step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvalign.cache.bare_keys import At
from kvalign.cache.form import Form
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.lasting import lasting

SLACK = 4  # a buffer has room for another 1 / SLACK of its entries
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

    def rows(self, rows: slice | Tensor) -> "KV":
        """Entries of some rows of the batch."""
        return KV(self.keys[rows], self.values[rows])

    def unless(self, is_other: Tensor, other: "KV") -> "KV":
        """Return the buffer with some rows, [B] bool, replaced by those of another."""
        rows = is_other[:, None, None, None]
        return KV(*(torch.where(rows, x, y) for x, y in zip(other, self, strict=True)))

    def padded(self, width: int) -> "KV":
        """Entries padded to `width` with zeros in front."""
        missing = width - self.keys.shape[2]
        return self.map(lambda x: pad(x, (0, 0, missing, 0)))


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


def slack_of(sizes: CacheSizes) -> int:
    """Spare entries of a buffer beyond those that are seen at once, and so the number of steps
    between two copies to its start.
    """
    return max(1, sizes.first_input_len // SLACK)


class KVBuffer:
    """Keys and values appended at the end; the owner knows how many of the last ones count.

    Args:
        like: entries of the shape [B, H, ?, D], on the device of those to store.
        sizes: of the cache. A step reads as many entries as it sees at once; `slack_of` more fit
            before a copy.
        form: of the stored entries.

    Attributes:
        data: all slots, as they are stored: [B, H, S, width of the form].
    """

    def __init__(self, like: KV, sizes: CacheSizes, form: Form):
        self.size, self.end, self.form = sizes.first_input_len + slack_of(sizes), 0, form
        self.data = like.map(lambda x: form.empty(x, 0))

    def stored(self, num: int) -> KV:
        """View of the newest entries as they are stored."""
        assert num <= self.end
        return self.data.slots(self.end - num, num)

    def read(self, slot: int, num: int, at: At) -> KV:
        """Entries [B, H, num, D] of the slots from this one on, for keys at the positions `at`."""
        return KV(*self.form.read_at(*self.data.slots(slot, num), at))

    def last(self, num: int, at: At) -> KV:
        """The newest entries [B, H, num, D], for keys at the positions `at`."""
        assert num <= self.end
        return self.read(self.end - num, num, at)

    def make_room(self, num_kept: int, num_new: int) -> None:
        """Make room for `num_new` more after the `num_kept` last ones."""
        assert num_kept <= self.end
        length = self.data.keys.shape[2]
        if self.end + num_new > length:
            self._compact(num_kept, num_kept + num_new)

    def put(self, slot: int, new: KV, rows: slice = slice(None)) -> None:
        """Write entries, as they are stored, into the slots from this one on."""
        self.data.slots(slot, new.keys.shape[2]).rows(rows).put(new)

    def write(self, new: KV) -> None:
        """Write new entries, as they are stored, after the last; there is room."""
        num = new.keys.shape[2]
        assert self.end + num <= self.data.keys.shape[2]
        self.put(self.end, new)
        self.end += num

    def rewrite(self, new: KV, rows: slice = slice(None)) -> None:
        """Write entries, as they are stored, over the newest."""
        self.put(self.end - new.keys.shape[2], new, rows)

    def replace(self, stored: KV) -> None:
        """Have these entries only, given as they are stored."""
        self.end = stored.keys.shape[2]
        self.data = stored.map(lambda x: _empty(x, max(self.end, 1)))
        self.stored(self.end).put(stored)

    @lasting()
    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        self.data = self.data.map(lambda x: x[rows.to(x.device)])

    def _compact(self, num_kept: int, needed: int) -> None:
        first, length = self.end - num_kept, self.data.keys.shape[2]
        if length < self.size or needed > length:
            length = max(needed, min(self.size, max(2 * needed, _SHORTEST)))
            old, self.data = self.data, self.data.map(lambda x: _empty(x, length))
            for x, y in zip(self.data, old, strict=True):
                x[:, :, :num_kept] = y[:, :, first : self.end]
        elif first:
            # In pieces that do not overlap with where they go: no second buffer.
            for start in range(0, num_kept, first):
                num = min(first, num_kept - start)
                for x in self.data:
                    x.narrow(2, start, num).copy_(x.narrow(2, first + start, num))
        self.end = num_kept


@lasting()
def _empty(like: Tensor, length: int) -> Tensor:
    num_rows, num_heads, _, width = like.shape
    return like.new_empty(num_rows, num_heads, length, width)
