"""Base of every policy: score the entries that a layer holds. The lowest goes when one must."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass
class Seen:
    """The entries that a step has seen in one layer: S a row and head in the order of time, the
    step's own T last.

    Attributes:
        layer: its index.
        num_fed: tokens of each row, the step's own included.
        keys, values: [B, H, S, D], as attention saw them: with their position.
        weights: [B, H, T, S] float32, attention of the step's queries, the mean of those that share
            a head of keys; only for a policy that `reads_weights`.
        before: [B, H, S - T] float32, what `score` gave last of the entries before; 0 at first.
    """

    layer: int
    num_fed: list[int]
    keys: Tensor
    values: Tensor
    weights: Tensor | None
    before: Tensor


class Policy(ABC):
    """One instance serves all layers and has no state: what it must remember is in its scores.

    Args:
        cache_size: entries that the cache keeps.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    reads_weights: ClassVar[bool] = False
    """Whether it needs attention weights, which not all architectures hand over."""
    accumulates: ClassVar[bool] = False
    """Whether each step changes its scores; else they are made when an entry must go."""

    def __init__(self, cache_size: int):
        self.cache_size = cache_size

    @abstractmethod
    def score(self, seen: Seen) -> Tensor:
        """Return the worth of each entry: [B, H, S] float32, higher stays; of equal ones the older
        goes. Sinks and the newest entries stay whatever they score. What a row lacks on the left
        may score anything.
        """

    def worth(self, scores: Tensor) -> Tensor:
        """Order in which entries are evicted, from the scores [B, H, S] that were given
        last, in the order of time: the same.
        """
        return scores
