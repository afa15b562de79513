"""Where entries lie that a memory gives back.

- By rank, side by side between sinks and window: positions that a text of C tokens has.
- By age: as far away as they are, if the model has as many positions, and by the logarithm of their
  age beyond: `near + knee * log(1 + (age - near) / knee)`, which is the age itself while that is
  small beside the knee.

Rotary positions are free: by age costs nothing, and is better for text and facts alike. Learned
ones are looked up, and a late one with few entries before it is what the model has not seen: by
rank is better for text, by age for facts (eval/results/memory.md).
"""

from dataclasses import dataclass, replace

from torch import Tensor

from kvalign.cache.sizes import CacheSizes

KNEE = 8
"""A model's positions over the knee."""


@dataclass(frozen=True)
class RecallPlaces:
    """The places of entries by their ages.

    Args:
        sizes: of the cache.
        num_positions: that the model, and a table, have.
        by_age: if not, by rank.
        is_free: whether a place may be any position.
    """

    sizes: CacheSizes
    num_positions: int
    by_age: bool
    is_free: bool

    def frame(self) -> CacheSizes:
        """The sizes by which positions run: where places are looked up by age, new tokens lie later
        by half of the positions, to leave room for what is taken back.
        """
        if self.is_free or not self.by_age:
            return self.sizes
        size = self.sizes.cache_size
        room = max(0, min(self.num_positions // 2, self.num_positions - 1 - size))
        return replace(self.sizes, cache_size=size + room)

    def __call__(self, ages: Tensor) -> Tensor:
        """The places [..., R] of entries of these ages, in the order of time."""
        sizes, num = self.sizes, ages.shape[-1]
        if not self.by_age:
            rank = ages.new_ones(num).cumsum(0) - 1
            return (sizes.num_sinks + rank).expand_as(ages)
        near, knee = sizes.num_in_sight + 1, max(1, self.num_positions // KNEE)
        away = (ages.clamp_min(near) - near).float()
        distance = near + (knee * (away / knee).log1p()).round().long()
        if self.is_free:
            return sizes.cache_size - distance.clamp_max(self.num_positions - 1)
        return (self.frame().cache_size - distance).clamp_min(sizes.num_sinks)
