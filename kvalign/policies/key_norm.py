"""`key-norm`: keys of small norm draw attention, so the entry whose key is the longest goes (Devoto
et al. 2024, arXiv:2406.11430).
"""

from torch import Tensor

from kvalign.policies.base import Policy, Seen


class KeyNorm(Policy):
    name = "key-norm"
    about = "the entry whose key has the largest norm goes"

    def score(self, seen: Seen) -> Tensor:
        return -seen.keys.float().norm(dim=-1)
