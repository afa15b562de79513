"""`value-norm`: evicts the entry whose value has the smallest norm."""

from torch import Tensor

from kvalign.policies.base import Policy, Seen


class ValueNorm(Policy):
    name = "value-norm"
    about = "evicts the entry whose value has the smallest norm"

    def score(self, seen: Seen) -> Tensor:
        return seen.values.float().norm(dim=-1)
