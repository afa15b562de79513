"""`h2o`: heavy hitters stay; the entry that has received the least attention is evicted (Zhang et
al. 2023, arXiv:2306.14048).

The sum of attention decays by half in C / `HALF_LIVES` steps. Otherwise an entry with much
attention long ago would never be evicted. A new entry has received none yet, so the newest ones are
protected (`num_recent`).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvalign.policies.base import Policy, Seen

HALF_LIVES = 16


class H2O(Policy):
    name = "h2o"
    about = "evicts the entry that received the least attention; old attention counts less"
    reads_weights = accumulates = True

    def score(self, seen: Seen) -> Tensor:
        assert seen.weights is not None
        num_new, decay = seen.weights.shape[2], 0.5 ** (HALF_LIVES / self.cache_size)
        ages = torch.arange(num_new - 1, -1, -1, dtype=torch.float32, device=seen.weights.device)
        drawn = decay**ages @ seen.weights
        return pad(seen.before, (0, num_new)) * decay**num_new + drawn
