"""`key-norm`: keys of small norm receive much attention, so the entry with the longest key is
evicted (Devoto et al. 2024, arXiv:2406.11430).

Norms are compared to 11 bits. In the first layer of a rotary model all keys of a token have the
same norm except for rounding, which depends on neighbouring rows. Then the older one is evicted.
"""

from torch import Tensor

from kvalign.policies.base import Policy, Seen


class KeyNorm(Policy):
    name = "key-norm"
    about = "evicts the entry whose key has the largest norm"

    def score(self, seen: Seen) -> Tensor:
        return -seen.keys.float().norm(dim=-1).half().float()
