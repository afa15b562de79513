"""The rows of a cache, each a stream of its own: which of them stay, and which join."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor

from kvalign.cache.buffer import Part
from kvalign.cache.realigner import Realigner
from kvalign.foundation.errors import UserError
from kvalign.foundation.not_pickled import NotPickled
from kvalign.models.input_ids import rows_of


class Rows(NotPickled, ABC):
    """Operations on the rows of a cache, by our names and by those of transformers.

    Attributes:
        seen: tokens that each row has been fed.
    """

    instead = "a cache is not pickled: state() gives its tensors, restore() takes them up"
    seen: list[int]
    layers: list[Any]
    attention: list[Any]
    realigner: Realigner

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Another of the same rows, which goes on alone; what places entries is shared."""
        memo[id(self.realigner)] = self.realigner
        memo[id(self)] = other = object.__new__(type(self))
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for layer in other.attention:
            layer.cache = other
        return other

    @abstractmethod
    def changing(self) -> AbstractContextManager[None]:
        """Around what changes it."""

    @abstractmethod
    def settle(self) -> Any:
        """Bring all entries to where the next token finds them."""

    @abstractmethod
    def _hold(self, seen: list[int]) -> None:
        """Have rows of so many tokens each, their entries where the next tokens find them."""

    def _parts(self) -> list[Part]:
        """Return the parts that hold rows."""
        return [*self.layers]

    def check_rows(self, num_rows: int) -> None:
        """Raise UserError unless a pass can be over so many rows."""
        if self.seen and num_rows != len(self.seen):
            raise UserError(f"this cache has {len(self.seen)} rows, got ids of {num_rows}")

    def select(self, rows: Sequence[int] | Tensor) -> None:
        """Keep these rows, in this order; one may come several times."""
        if not self.seen:
            return
        rows = rows_of(rows, len(self.seen))
        with self.changing():
            self.settle()
            for part in self._parts():
                part.select(torch.tensor(rows, dtype=torch.int64))
            self._hold([self.seen[row] for row in rows])

    def join(self, others: Sequence[Self]) -> None:
        """Add the rows of caches made alike, each fed something, after those that are here."""
        caches = [cache for cache in (self, *others) if cache.seen]
        if caches == [self] or not caches:
            return
        for cache in caches:
            cache.settle()
        with self.changing():
            for part, *joined in zip(self._parts(), *(x._parts() for x in caches), strict=True):
                part.join(joined)
            self._hold([n for cache in caches for n in cache.seen])
