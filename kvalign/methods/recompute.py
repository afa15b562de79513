"""`recompute`: re-encode the last C + 1 tokens at every step; exact, and slow by a factor that
grows with C.

The oracle of both papers. It keeps no sinks (the paper's protocol); `num_sinks` adds them.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.methods.base import Reencoding
from kvalign.sizes import CacheSizes


class Recompute(Reencoding):
    name = "recompute"
    about = "re-encodes the window at every step"
    default_num_sinks = 0

    def __init__(self, model: PreTrainedModel, sizes: CacheSizes):
        super().__init__(model, sizes)
        self.reset()

    def reset(self) -> None:
        self.seen = None

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        self.seen = self.keep(ids if self.seen is None else torch.cat([self.seen, ids], 1))
        out = self.model(input_ids=self.seen, use_cache=False, logits_to_keep=1)
        return out.logits[:, -1].float()
