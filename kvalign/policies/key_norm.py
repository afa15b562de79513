"""`key-norm`: keys of small norm draw attention, so the entry whose key is the longest goes (Devoto
et al. 2024, arXiv:2406.11430).

Norms are compared to 11 bits. In the first layer of a rotary model all keys of a token have one
norm but for rounding, which depends on the rows beside it; so the older goes.
"""

from torch import Tensor

from kvalign.policies.base import Policy, Seen


class KeyNorm(Policy):
    name = "key-norm"
    about = "evicts the entry whose key has the largest norm"

    def score(self, seen: Seen) -> Tensor:
        return -seen.keys.float().norm(dim=-1).half().float()
