"""Policies that look at entries: their order, their keys."""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize, pad

from kvalign.policies.base import Policy, Seen


class Oldest(Policy):
    """First in, first out, as in StreamingLLM."""

    name = "oldest"
    about = "evicts the oldest entry, the same in all layers and heads"

    def score(self, seen: Seen) -> Tensor:
        ranks = torch.arange(seen.keys.shape[2], device=seen.keys.device, dtype=torch.float32)
        return ranks.expand(seen.keys.shape[:3])


class Random(Policy):
    """The baseline for other policies."""

    name = "random"
    about = "evicts a random entry, drawn by layer, head and length of the stream"

    def score(self, seen: Seen) -> Tensor:
        _, num_heads, num_entries, _ = seen.keys.shape
        rows = []
        for num_fed in seen.num_fed:
            # Of the row alone: it draws the same in any company and after a restart.
            generator = torch.Generator().manual_seed((num_fed << 12) + seen.layer)
            num_own = min(num_fed, num_entries)
            own = torch.rand(num_heads, num_own, generator=generator, dtype=torch.float32)
            rows.append(pad(own, (num_entries - num_own, 0)))
        return torch.stack(rows).to(seen.keys.device)


class KeyNorm(Policy):
    """Keys of small norm receive much attention (Devoto et al. 2024, arXiv:2406.11430).

    Norms are compared to 11 bits. In the first layer of a rotary model all keys of a token have the
    same norm except for rounding, which depends on neighbouring rows. Then the older one is
    evicted.
    """

    name = "key-norm"
    about = "evicts the entry whose key has the largest norm"

    def score(self, seen: Seen) -> Tensor:
        return -seen.keys.float().norm(dim=-1).half().float()


class KeyDiff(Policy):
    """Keys unlike the others receive much attention (Park et al. 2025, arXiv:2504.15364)."""

    name = "keydiff"
    about = "evicts the entry whose key is most like the mean of all keys"

    def score(self, seen: Seen) -> Tensor:
        keys = seen.keys.float()
        mean = normalize(keys, dim=-1).mean(2, keepdim=True)
        return -cosine_similarity(keys, mean, dim=-1)
