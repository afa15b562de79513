"""Entries that a memory gives back: how many by default, and in which layers, as `--recall-layers`
names them.
"""

from collections.abc import Sequence

from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import typed

NAME = "recall_layers"
MOST_RECALLED = 32
"""Upper limit of the default; more gains almost nothing (eval/results/memory.md)."""


def usual_recalled(cache_size: int, num_sinks: int) -> int:
    """Default number of entries that a step takes back: a quarter of the cache, at most
    `MOST_RECALLED`. The window keeps at least one entry.
    """
    return max(1, min(cache_size // 4, MOST_RECALLED, cache_size - num_sinks - 1))


def layers_asked(text: str | None, attention: Sequence[int]) -> set[int]:
    """Return which of the layers that have attention are asked for; None: all. UserError if one has
    none.
    """
    asked = {*attention} if text is None else numbers_in(text)
    if others := asked - {*attention}:
        raise UserError(
            f"{NAME} must be among the {len(attention)} layers that have attention, up to "
            f"{attention[-1]}: {min(others)} has none"
        )
    return asked


def numbers_in(text: str) -> set[int]:
    """Return the numbers of `"7,15-29"`: 7 and those from 15 to 29; UserError for anything else."""
    found: set[int] = set()
    for part in typed(NAME, text, str).split(","):
        first, _, last = (x.strip() for x in part.partition("-"))
        ends = (first, last or first)
        if not all(x.isascii() and x.isdigit() and len(x) < 6 for x in ends):
            raise UserError(f"{NAME} must be numbers and ranges as 7,15-29, got {text!r:.80}")
        if int(ends[0]) > int(ends[1]):
            raise UserError(f"{NAME} must have ranges that go up, as 15-29, got {text!r:.80}")
        found.update(range(int(ends[0]), int(ends[1]) + 1))
    return found
