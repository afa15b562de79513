"""`value-norm`: the entry whose value has the smallest norm goes."""

from torch import Tensor

from kvalign.policies.base import Policy, Seen


class ValueNorm(Policy):
    name = "value-norm"
    about = "the entry whose value has the smallest norm goes"

    def score(self, seen: Seen) -> Tensor:
        return seen.values.float().norm(dim=-1)
