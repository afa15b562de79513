"""Rows of a cache, each a stream of its own: selecting and joining them."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor

from kvalign.cache.realigner import Realigner
from kvalign.cache.ring import Part
from kvalign.foundation.errors import UserError
from kvalign.foundation.not_pickled import NotPickled
from kvalign.models.input_ids import rows_of


class Rows(NotPickled, ABC):
    """Operations on the rows of a cache, under our names and under those of transformers.

    Attributes:
        seen: number of tokens that each row has been fed.
    """

    instead = "a cache cannot be pickled: state() returns its tensors, restore() restores them"
    seen: list[int]
    layers: list[Any]
    attention: list[Any]
    realigner: Realigner

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy with the same rows, which continues alone; the realigner is shared."""
        memo[id(self.realigner)] = self.realigner
        memo[id(self)] = other = object.__new__(type(self))
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for layer in other.attention:
            layer.cache = other
        return other

    @abstractmethod
    def changing(self) -> AbstractContextManager[None]:
        """Context for one change."""

    @abstractmethod
    def settle(self) -> Any:
        """Bring all entries to where the next token finds them."""

    @abstractmethod
    def _hold(self, seen: list[int]) -> None:
        """Set up rows of so many tokens each, with entries where the next tokens find them."""

    @abstractmethod
    def _hold_in_order(self, seen: list[int]) -> None:
        """Same, with entries in the order of time."""

    def _parts(self) -> list[Part]:
        """Return the parts that hold rows."""
        return [*self.layers]

    def check_rows(self, num_rows: int) -> None:
        """Raise UserError unless a pass can have so many rows."""
        if self.seen and num_rows != len(self.seen):
            raise UserError(f"this cache has {len(self.seen)} rows, got ids of {num_rows}")

    def select(self, rows: Sequence[int] | Tensor) -> None:
        """Keep these rows, in this order; one may occur several times."""
        if not self.seen:
            return
        rows = rows_of(rows, len(self.seen))
        if rows == [*range(len(self.seen))]:
            return
        with self.changing():
            self.settle()
            for part in self._parts():
                part.select(torch.tensor(rows, dtype=torch.int64))
            self._hold([self.seen[row] for row in rows])

    def join(self, others: Sequence[Self]) -> None:
        """Append the rows of caches with the same arguments, each of which was fed something."""
        caches = [cache for cache in (self, *others) if cache.seen]
        if caches == [self] or not caches:
            return
        for cache in caches:
            cache.settle()
        with self.changing():
            for part, *joined in zip(self._parts(), *(x._parts() for x in caches), strict=True):
                part.join(joined)
            self._hold_in_order([n for cache in caches for n in cache.seen])
