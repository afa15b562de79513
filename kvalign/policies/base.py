"""Base of every policy: score the entries of a layer. The one with the lowest score is evicted."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


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
