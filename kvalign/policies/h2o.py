"""`h2o`: heavy hitters stay: the entry that has drawn the least attention goes (Zhang et al. 2023,
arXiv:2306.14048).

The sum of attention decays, by half in C / `HALF_LIVES` steps: without, what drew much of it long
ago is never let go. A new entry has drawn nothing yet, so the newest ones have to be protected
(`num_recent`).
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
        ages = torch.arange(num_new - 1, -1, -1, device=seen.weights.device)
        drawn = decay**ages @ seen.weights
        return pad(seen.before, (0, num_new)) * decay**num_new + drawn
