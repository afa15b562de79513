"""Policies that look at attention: which entries queries have read."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvalign.policies.base import Policy, Seen

HALF_LIVES = 16  # of a sum of attention, in as many steps as the cache has entries
SHARE = 0.3  # of the mean attention: an entry with less received little


class Tova(Policy):
    """The newest query decides, the same in all heads of a layer (Oren et al. 2024,
    arXiv:2401.06104).
    """

    name = "tova"
    about = "evicts the entry that the last token attends to least, by layer"
    reads_weights = True

    def score(self, seen: Seen) -> Tensor:
        assert seen.weights is not None
        last = seen.weights[:, :, -1]
        return last.mean(1, keepdim=True).expand_as(last)


class H2O(Policy):
    """Heavy hitters stay (Zhang et al. 2023, arXiv:2306.14048).

    The sum of attention decays by half in C / `HALF_LIVES` steps. Otherwise an entry with much
    attention long ago would never be evicted. A new entry has received none yet, so the newest ones
    are protected (`num_recent`).
    """

    name = "h2o"
    about = "evicts the entry that received the least attention; old attention counts less"
    reads_weights = accumulates = True

    def score(self, seen: Seen) -> Tensor:
        assert seen.weights is not None
        num_new, decay = seen.weights.shape[2], 0.5 ** (HALF_LIVES / self.cache_size)
        ages = torch.arange(num_new - 1, -1, -1, dtype=torch.float32, device=seen.weights.device)
        drawn = decay**ages @ seen.weights
        return pad(seen.before, (0, num_new)) * decay**num_new + drawn


class SecondChance(H2O):
    """The page replacement of that name, which skips recently used pages (Corbato 1968).

    Attention is summed as in `h2o`, which evicts entries of any age for heavier ones. This policy
    evicts only old ones, so it loses less of the entries that `oldest` would keep, and gains less
    beyond.
    """

    name = "second-chance"
    about = "evicts the oldest entry that receives little attention, or else the oldest"

    def worth(self, scores: Tensor) -> Tensor:
        num_entries = scores.shape[2]
        ranks = torch.arange(num_entries, device=scores.device, dtype=torch.float32)
        is_used = scores >= SHARE * scores.mean(-1, keepdim=True)
        return ranks + num_entries * is_used
