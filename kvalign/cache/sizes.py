"""Sizes of a streaming cache, the only place of its arithmetic.

places  0 1 2 3 | 4 5 6 ... C-1      C = cache_size entries are stored between two steps
        sinks   | window
slots   0 1 2 3 | 4 5 6 ... C-1 C    where they lie: C + 1, of which the window's are a ring
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypedDict, TypeVar, get_args

from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import MOST, check_fields, option, typed
from kvalign.policies import OLDEST, POLICIES

if TYPE_CHECKING:
    from torch import Tensor

    from kvalign.models.architectures import ModelSpec


N = TypeVar("N", int, "Tensor")
Positions = Literal["compact", "keep"]
CacheDtype = Literal["model", "int8"]
RecallBy = Literal["age", "rank"]
OF_MEMORY = ("memory", "num_recalled", "recall_places", "recall_layers")
OF_POLICY = ("policy", "num_recent", "positions", "cache_dtype", *OF_MEMORY)
"""Sizes of methods that keep entries in a cache."""


class SizesConfig(TypedDict, total=False):
    """Keywords of `CacheSizes`, besides cache_size; None: the method's default. num_evicted may be
    `"half"`, `"quarter"` or `"eighth"` of the entries after the sinks.
    """

    num_sinks: int | None
    num_evicted: int | str | None
    realign_every: int | None
    policy: str | None
    num_recent: int | None
    positions: str | None
    cache_dtype: str | None
    memory: int | None
    num_recalled: int | None
    recall_places: str | None
    recall_layers: str | None


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of a cache: how many entries it keeps and evicts, and which.

    Raises:
        UserError: sizes that are not whole numbers or do not fit together; an unknown policy.
    """

    cache_size: int = option(
        help="entries stored between two steps, sinks included; a step sees one more",
        at_least=1,
        at_most=2 * MOST,  # a memory, too, counts its slots so
    )
    num_sinks: int = option(4, help="first entries that are never evicted", at_least=0)
    num_evicted: int = option(
        1, help="entries evicted at once, right after the sinks, when the cache is full"
    )
    realign_every: int = option(
        1,
        help="number of evicted entries after which the others are realigned; until then positions "
        "run on",
        at_least=1,
    )
    policy: str = option(
        OLDEST, help="which entries are evicted (kvalign list policies)", choices=POLICIES
    )
    num_recent: int | None = option(
        None,
        help="newest entries, with the new one, that policies other than oldest never evict "
        "(default: a quarter of the window)",
    )
    positions: Positions = option(
        "compact",
        help="compact: an entry has the position of its place; keep: entries keep their original "
        "positions, until the context length ends",
        choices=get_args(Positions),
    )
    cache_dtype: CacheDtype = option(
        "model",
        help="type of stored entries: the model's, or int8, a quarter of the bytes of float32",
        choices=get_args(CacheDtype),
    )
    memory: int = option(
        0,
        help="evicted tokens to store; each step takes back the entries that match its query; 0: "
        "none",
        at_least=0,
    )
    num_recalled: int | None = option(
        None,
        help="entries that a step takes back, in place of window entries (default: a quarter of "
        "the cache, at most 48 by age and 32 by rank)",
    )
    recall_places: RecallBy | None = option(
        None,
        help="positions of the entries taken back (default: the model's plan)",
        choices=get_args(RecallBy),
    )
    recall_layers: str | None = option(
        None,
        help="layers that take entries back, counted from 0: all, or as 7,15-29:-2, with what is "
        "added to their scores (default: the model's plan)",
    )

    lift = 0  # of a `Frame`

    def __post_init__(self) -> None:
        check_fields(self)
        if self.cache_size <= self.num_sinks:
            raise UserError(
                f"cache_size must be above num_sinks ({self.num_sinks}) to leave room for a "
                f"window, got {self.cache_size}"
            )
        if not 1 <= self.num_evicted <= self.window_size:
            raise UserError(
                f"num_evicted must be between 1 and the window ({self.window_size} = cache_size "
                f"{self.cache_size} less num_sinks {self.num_sinks}), got {self.num_evicted}"
            )
        if not self.is_oldest and (self.cache_dtype == "int8" or self.realign_every > 1):
            name = "cache_dtype int8" if self.cache_dtype == "int8" else "realign_every"
            raise UserError(
                f"{name} needs policy oldest with compact positions: other settings place all "
                "entries at each step"
            )
        most = self.window_size + 1 - self.num_evicted
        if self.num_recent is None:
            num_recent = 0 if self.policy == OLDEST else self.window_size // 4
            object.__setattr__(self, "num_recent", min(num_recent, most))
        elif not 0 <= self.num_recent <= most:
            raise UserError(
                f"num_recent must be between 0 and {most} with cache_size {self.cache_size}, "
                f"num_sinks {self.num_sinks} and num_evicted {self.num_evicted}, got "
                f"{self.num_recent}"
            )
        asks = any(getattr(self, name) for name in OF_MEMORY)
        object.__setattr__(self, "num_recalled", _num_recalled(self) if asks else 0)
        if self.recall_layers == "all":
            object.__setattr__(self, "recall_layers", None)

    @property
    def num_in_sight(self) -> int:
        """Newest entries after the sinks that a step always sees."""
        assert self.num_recalled is not None
        return self.window_size - self.num_recalled

    @cached_property
    def is_oldest(self) -> bool:
        """Return whether the kept entries are a slice of the stream, which a ring can hold."""
        return self.policy == OLDEST and self.positions == "compact"

    @cached_property
    def window_size(self) -> int:
        """Entries after the sinks."""
        return self.cache_size - self.num_sinks

    @cached_property
    def first_input_len(self) -> int:
        """Tokens that an empty cache reads before anything is evicted: C + 1."""
        return self.cache_size + 1

    @cached_property
    def num_window_slots(self) -> int:
        """Slots of the ring: one more than the window, for the new entry."""
        return self.window_size + 1

    def slot(self, place: int) -> int:
        """Slot of the `place`-th entry of a row: sinks come first and stay, and the others go round
        the ring behind them.
        """
        num_sinks = self.num_sinks
        if place < num_sinks:
            return place
        return num_sinks + (place - num_sinks) % self.num_window_slots

    def num_dropped(self, num_entries: N) -> N:
        """Return how many of so many entries (a number, or an int64 tensor of any shape) are
        evicted so that the rest can be stored: a multiple of `num_evicted`.
        """
        dropped = -(-(num_entries - self.cache_size) // self.num_evicted) * self.num_evicted
        return dropped * (dropped > 0)

    def num_stored(self, num_seen: int) -> int:
        """Number of entries stored after so many tokens."""
        return num_seen - self.num_dropped(num_seen)

    def num_forgotten(self, num_evicted: int) -> int:
        """Return how many of so many evicted tokens are in no memory, with those that what is taken
        back displaces from the window.
        """
        assert self.num_recalled is not None
        return max(0, num_evicted + self.num_recalled - self.memory)

    def num_moved(self, num_entries: N) -> N:
        """Positions by which kept entries have been moved after so many tokens: all that were
        evicted, or those up to the last multiple of `realign_every`, less `lift`.
        """
        return self.num_dropped(num_entries) - self.num_behind(num_entries)

    def num_behind(self, num_entries: N) -> N:
        """Positions by which entries lie beyond their places: what the stream has run on since the
        last move, and `lift` once something was evicted.
        """
        dropped = self.num_dropped(num_entries)
        return dropped % self.move_size + self.lift * (dropped > 0)

    @cached_property
    def move_size(self) -> int:
        """Positions of a move: `realign_every`, in whole evictions."""
        return -(-self.realign_every // self.num_evicted) * self.num_evicted

    @property
    def last_position(self) -> int:
        """The highest position of a token that is fed alone."""
        return self.cache_size + self.move_size - self.num_evicted + self.lift

    def check_fits(self, spec: ModelSpec) -> None:
        """Raise UserError unless the model has a position for each entry and the new token."""
        if spec.context_len is None or self.last_position < spec.context_len:
            return
        if self.cache_size >= spec.context_len:
            raise UserError(
                f"cache_size must be at most {spec.context_len - 1} for {spec.name} (its context "
                f"length less the new token), got {self.cache_size}"
            )
        room = spec.context_len - 1 - self.cache_size
        most = (room // self.num_evicted + 1) * self.num_evicted
        raise UserError(
            f"realign_every must be at most {most} for {spec.name} "
            f"with cache_size {self.cache_size} (positions run on), got {self.realign_every}"
        )


@dataclass(frozen=True)
class Frame(CacheSizes):
    """Sizes of a cache whose entries lie beyond their places.

    Attributes:
        lift: by so many positions, from the first eviction on.
    """

    lift: int = option(0, help="positions by which entries are lifted", at_least=0)


def _num_recalled(sizes: CacheSizes) -> int:
    from kvalign.cache.memory_sizes import num_recalled_of

    return num_recalled_of(sizes)


PARTS = {"half": 2, "quarter": 4, "eighth": 8}  # of a window


def num_evicted_of(value: int | str, window_size: int) -> int:
    """Number of entries to evict at once, from a number or a part of the window; LLM runtimes
    discard `half`. UserError for anything else.
    """
    if not isinstance(value, str):
        return typed("num_evicted", value, int)
    if value in PARTS:
        return max(1, window_size // PARTS[value])
    if not (value.isascii() and value.isdigit()):
        raise UserError(f"num_evicted takes numbers or {', '.join(PARTS)}, got {value!r}")
    return int(value)
