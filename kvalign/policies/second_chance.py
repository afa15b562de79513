"""`second-chance`: the oldest entry goes that draws little attention, as page replacement of that
name passes over what was used since (Corbato 1968).

Attention is summed as by `h2o`; little is less than `SHARE` of the mean of all entries. Where `h2o`
gives up entries of any age for heavier ones, this gives up old ones alone: less is lost of what
`oldest` would keep, and less is won beyond.
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
