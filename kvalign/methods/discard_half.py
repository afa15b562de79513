"""`discard-half`: when the cache is full, drop half of what follows the sinks and re-encode the
rest once.

The default of llama.cpp's and LLM Runtime's endless generation. Between two refills its entries are
never stale, but a step sees only three quarters of the cache on average.
"""

import torch
from torch import Tensor
from transformers import DynamicCache

from kvalign.cache import entries_of, read_entries
from kvalign.methods.base import Reencoding


class DiscardHalf(Reencoding):
    name = "discard-half"
    about = "drops half of the window when full and re-encodes the rest"
    fixed = ("num_evicted",)

    @classmethod
    def default_num_evicted(cls, cache_size: int, num_sinks: int) -> int:
        return max(1, (cache_size - num_sinks) // 2)

    def reset(self) -> None:
        super().reset()
        self.cache = DynamicCache()

    def state(self) -> dict[str, Tensor]:
        return super().state() | entries_of(self.cache)

    def restore(self, state: dict[str, Tensor]) -> None:
        super().restore(state)
        if self.seen is not None:
            self.cache = DynamicCache(read_entries(state, self.model, self.seen.shape[1]))

    def feed(self, ids: Tensor) -> Tensor:
        seen = ids if self.seen is None else torch.cat([self.seen, ids], 1)
        self.seen = self.keep(seen)
        if self.seen is not seen:
            self.cache, ids = DynamicCache(), self.seen
        return self.forward(ids, self.cache)
