"""`discard-half`: when the cache is full, drop half of what follows the sinks and re-encode the
rest once.

The default of llama.cpp's and LLM Runtime's endless generation. Between two refills its entries are
never stale, but a step sees only three quarters of the cache on average.
"""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvalign.cache import entries_of, read_entries
from kvalign.methods.base import Reencoding
from kvalign.sizes import CacheSizes


class DiscardHalf(Reencoding):
    name = "discard-half"
    about = "drops half of the window when full and re-encodes the rest"
    fixed = ("num_evicted",)

    def __init__(self, model: PreTrainedModel, sizes: CacheSizes):
        super().__init__(model, sizes)
        self.reset()

    @classmethod
    def default_num_evicted(cls, cache_size: int, num_sinks: int) -> int:
        return max(1, (cache_size - num_sinks) // 2)

    def reset(self) -> None:
        self.seen = None
        self.cache = DynamicCache()

    def state(self) -> dict[str, Tensor]:
        return super().state() | entries_of(self.cache)

    def restore(self, state: dict[str, Tensor]) -> None:
        super().restore(state)
        if self.seen is not None:
            self.cache = DynamicCache(read_entries(state, self.model, self.seen.shape[1]))

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        seen = ids if self.seen is None else torch.cat([self.seen, ids], 1)
        self.seen = self.keep(seen)
        if self.seen is not seen:
            self.cache, ids = DynamicCache(), self.seen
        out = self.model(
            input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        return out.logits[:, -1].float()
