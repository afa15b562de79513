"""Base of every policy, and those that ship. A policy scores the entries of a layer, and the one
with the lowest score is evicted. Ours look at entries (their order, their keys), or at attention:
which entries queries have read.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize, pad

HALF_LIVES = 16  # of a sum of attention, in as many steps as the cache has entries
SHARE = 0.3  # of the mean attention: an entry with less received little


@dataclass
class Seen:
    """Entries that a step has seen in one layer: S for each row and head in the order of time, the
    step's own T last.

    Attributes:
        layer: its index.
        num_fed: tokens of each row, the step's own included.
        keys, values: [B, H, S, D], as attention saw them: with their position.
        weights: [B, H, T, S] float32, attention of the step's queries, the mean over those that
            share a head of keys; only for a policy that `reads_weights`.
        before: [B, H, S - T] float32, the last scores of the entries before; 0 at first.
    """

    layer: int
    num_fed: list[int]
    keys: Tensor
    values: Tensor
    weights: Tensor | None
    before: Tensor


class Policy(ABC):
    """Policy without state: one instance serves all layers. Anything to remember must be in its
    scores.

    Args:
        cache_size: entries that the cache keeps.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    reads_weights: ClassVar[bool] = False
    """Whether it needs attention weights, which not all architectures expose."""
    accumulates: ClassVar[bool] = False
    """Whether each step changes its scores; else they are computed at an eviction."""

    def __init__(self, cache_size: int):
        self.cache_size = cache_size

    @abstractmethod
    def score(self, seen: Seen) -> Tensor:
        """Return the worth of each entry: [B, H, S] float32; higher stays, of equal ones the older
        is evicted. Sinks and the newest entries stay in any case. Missing entries on a row's left
        may have any score.
        """

    def worth(self, scores: Tensor) -> Tensor:
        """Order of eviction from the last scores [B, H, S], in the order of time: the scores."""
        return scores


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
