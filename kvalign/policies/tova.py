"""`tova`: the entry that the newest query attends to least is evicted, the same in all heads of a
layer (Oren et al. 2024, arXiv:2401.06104).
"""

from torch import Tensor

from kvalign.policies.base import Policy, Seen


class Tova(Policy):
    name = "tova"
    about = "evicts the entry that the last token attends to least, by layer"
    reads_weights = True

    def score(self, seen: Seen) -> Tensor:
        assert seen.weights is not None
        last = seen.weights[:, :, -1]
        return last.mean(1, keepdim=True).expand_as(last)
