"""`second-chance`: the oldest entry with little attention is evicted, as the page replacement of
that name skips recently used pages (Corbato 1968).

Attention is summed as in `h2o`; little means less than `SHARE` of the mean over all entries. `h2o`
evicts entries of any age for heavier ones. This policy evicts only old ones, so it loses less of
the entries that `oldest` would keep, and gains less beyond.
"""

import torch
from torch import Tensor

from kvalign.policies.h2o import H2O

SHARE = 0.3


class SecondChance(H2O):
    name = "second-chance"
    about = "evicts the oldest entry that receives little attention, or else the oldest"

    def worth(self, scores: Tensor) -> Tensor:
        num_entries = scores.shape[2]
        ranks = torch.arange(num_entries, device=scores.device, dtype=torch.float32)
        is_used = scores >= SHARE * scores.mean(-1, keepdim=True)
        return ranks + num_entries * is_used
