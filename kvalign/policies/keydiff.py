"""`keydiff`: keys unlike the others receive much attention, so the entry whose key is most like the
mean key is evicted (Park et al. 2025, arXiv:2504.15364).
"""

from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from kvalign.policies.base import Policy, Seen


class KeyDiff(Policy):
    name = "keydiff"
    about = "evicts the entry whose key is most like the mean of all keys"

    def score(self, seen: Seen) -> Tensor:
        keys = seen.keys.float()
        mean = normalize(keys, dim=-1).mean(2, keepdim=True)
        return -cosine_similarity(keys, mean, dim=-1)
