"""Places of the entries that a memory gives back.

- By rank, side by side between sinks and window: positions that a text of C tokens has.
- By age: `near + knee * log(1 + (age - near) / knee)` away, which is the age itself while that is
  small beside the knee. Neighbours keep apart, as far as they are, or by a few tokens: of two old
  facts of one key a model can else not tell which is newer. Farther away, or farther apart, models
  read less of what is taken back: nothing is gained by keeping distances (eval/results/memory.md).

Rotary positions are free: by age costs nothing, and is better for text and facts alike. Learned
ones are looked up, and a late one with few entries before it is what the model has not seen: by
rank is better for text (eval/results/memory.md).
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvalign.cache.sizes import CacheSizes

KNEE = 32
"""A model's positions over the knee."""
APART = 8
"""Most tokens between two neighbours that lie closer than they were."""
ROOM = 2 * APART
"""Positions that tokens leave, by age, for each entry that is taken back, if there are as many."""
RECENCY_BY_AGE, RECENCY_BY_RANK = 0.5, 2.0
"""By how much a score is worth less for each e-fold of age: more where entries lie by rank, since
attention does not see there how old they are (eval/results/memory.md)."""
ALIKE_BY_AGE, ALIKE_BY_RANK = 0.95, 0.7
"""Cosine from which two keys say the same, once what all of those compared share is taken off: less
where entries lie by rank, since attention then takes an old fact for its newer version
(eval/results/memory.md)."""
COMPARED_BY_AGE, COMPARED_BY_RANK = 2, 4
"""Times as many entries as are taken back are compared with one another: more where more of them
say the same (eval/results/memory.md)."""
LEAST_SHARE = 0.5
"""By rank, how much the oldest entry counts of one in the window, which may say the same anew
(eval/results/memory.md)."""


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

    @cached_property
    def frame(self) -> CacheSizes:
        """The sizes by which positions run: where places are looked up by age, new tokens lie later
        by up to half of the positions, to leave room for what is taken back.
        """
        if self.is_free or not self.by_age:
            return self.sizes
        size = self.sizes.cache_size
        most = ROOM * (self.sizes.num_recalled or 0)
        room = max(0, min(most, self.num_positions // 2, self.num_positions - 1 - size))
        return replace(self.sizes, cache_size=size + room)

    @property
    def recency(self) -> float:
        """Loss of an entry's score for each e-fold of its age."""
        return RECENCY_BY_AGE if self.by_age else RECENCY_BY_RANK

    @property
    def alike(self) -> float:
        """Cosine of two keys from which the older entry is not taken back."""
        return ALIKE_BY_AGE if self.by_age else ALIKE_BY_RANK

    @property
    def num_compared(self) -> int:
        """Entries that are compared with one another for each query."""
        assert self.sizes.num_recalled is not None
        return self.sizes.num_recalled * (COMPARED_BY_AGE if self.by_age else COMPARED_BY_RANK)

    def age_bias(self, ages: Tensor) -> Tensor | None:
        """Return what is added to the scores of entries of these ages [...], for want of a place
        that says how old they are: by rank what is older than a window of C entries counts C / age
        of one that is not, but no less than `LEAST_SHARE`. None: nothing.
        """
        if self.by_age:
            return None
        return (self.sizes.cache_size / ages.float()).clamp(LEAST_SHARE, 1).log()

    @property
    def near(self) -> int:
        """Tokens from right before the window to the query."""
        return self.sizes.num_in_sight + 1

    @property
    def room(self) -> int:
        """Positions beyond right before the window that an entry may lie at."""
        if self.is_free:
            return self.num_positions - 1 - self.near
        return self.frame.cache_size - self.near - self.sizes.num_sinks

    def beyond(self, ages: Tensor) -> Tensor:
        """Distances in tokens, beyond the place right before the window, of entries of these ages
        [..., R], in the order of time, lie; by rank [R].
        """
        num = ages.shape[-1]
        if not self.by_age:
            return torch.arange(num - 1, -1, -1, device=ages.device)
        away, far = (ages - self.near).clamp_min(0), self.far(ages)
        apart = torch.maximum(-far.diff(), (-away.diff()).clamp_max(self.most_apart(num)))
        beyond = torch.cat([apart, far[..., -1:]], -1).flip(-1).cumsum(-1).flip(-1)
        return beyond.round().clamp_max(self.room)

    def far(self, ages: Tensor) -> Tensor:
        """Return how far beyond the window entries of these ages [...] lie if they have no
        neighbours, float32.
        """
        knee = max(1, self.num_positions // KNEE)
        return ((ages - self.near).clamp_min(0).float() / knee).log1p().mul(knee)

    def most_apart(self, num: int) -> int:
        """Return the most tokens between neighbours, of so many entries, that lie closer than they
        were.
        """
        return min(APART, max(1, self.room // (2 * num)))

    def at(self, ages: Tensor, now: int | Tensor) -> Tensor:
        """Their places, shaped as `beyond`, for tokens at the positions `now` [B, 1, T, 1]: before
        the frame is full these are not yet its last.
        """
        last = now if self.by_age else self.sizes.cache_size
        return (last - self.near - self.beyond(ages)).long().clamp_min(0)
