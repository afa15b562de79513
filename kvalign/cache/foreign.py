"""Interface of a cache of fixed size for transformers, and for printing."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import Cache

from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import typed


class ForeignCalls(Cache, ABC):
    """Calls that need only the counts of the cache's rows, or are refused."""

    sizes: CacheSizes
    seen: list[int]
    _is_user_defined = False  # transformers' `generate` says that it is, of a cache it was given

    @abstractmethod
    def select(self, rows: Sequence[int] | Tensor) -> None:
        """Keep these rows, in this order; one may occur several times."""

    def check_caller(self) -> None:
        """Raise UserError within a pass of plain `model.generate`."""
        if self._is_user_defined:
            raise UserError(
                "model.generate counts its own positions, which are wrong once this cache evicts: "
                "pass custom_generate=kvalign.stream_generate, cache_size=... instead of the "
                "cache, or use kvalign.stream_tokens"
            )

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise UserError("a streaming cache cannot be cropped: the entries it evicted are gone")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select(
            [row for row in range(len(self.seen)) for _ in range(typed("repeats", repeats, int))]
        )

    def __repr__(self) -> str:
        """`StreamingCache(cache_size=64, num_sinks=4): 64 entries in it, 100 tokens seen`, of each
        row if there are several.
        """
        sizes, seen = self.sizes, self.seen or [0]
        some = f"cache_size={sizes.cache_size}, num_sinks={sizes.num_sinks}"
        some += "" if sizes.is_oldest else f", policy={sizes.policy!r}"
        some += f", memory={sizes.memory}" if sizes.memory else ""
        stored, fed = (
            "/".join(map(str, numbers))
            for numbers in ([sizes.num_stored(num) for num in seen], seen)
        )
        return f"{type(self).__name__}({some}): {stored} entries in it, {fed} tokens seen"
