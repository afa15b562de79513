"""`oldest`: first in, first out, as in StreamingLLM."""

import torch
from torch import Tensor

from kvalign.policies.base import Policy, Seen


class Oldest(Policy):
    name = "oldest"
    about = "evicts the oldest entry, the same in all layers and heads"

    def score(self, seen: Seen) -> Tensor:
        ranks = torch.arange(seen.keys.shape[2], device=seen.keys.device, dtype=torch.float32)
        return ranks.expand(seen.keys.shape[:3])
