"""Sizes of a memory: how many entries it gives back, in which layers, and with which bias."""

from collections.abc import Sequence
from contextlib import suppress

from kvalign.cache.sizes import OF_MEMORY, CacheSizes, RecallBy
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import typed

NAME, ALL = "recall_layers", "all"
MOST_BIAS = 10.0
MOST_RECALLED: dict[RecallBy, int] = {"age": 48, "rank": 32}
"""Upper limit of the default, by where entries lie. More gain little, and take time, most of all by
rank, where a search compares twice as many (eval/results/memory.md)."""


def num_recalled_of(sizes: CacheSizes) -> int:
    """Return the number of entries that each step takes back, of sizes that have something to do
    with a memory; UserError if they do not fit together.
    """
    if not sizes.memory:
        if any(getattr(sizes, name) for name in OF_MEMORY):
            raise UserError(f"{', '.join(OF_MEMORY[1:])} need a memory: give memory, too")
        return 0
    if not sizes.is_oldest or sizes.num_evicted != 1:
        raise UserError(
            "memory needs policy oldest, which evicts one entry at a time: leave out policy, "
            "positions and num_evicted"
        )
    if sizes.window_size < 2:
        raise UserError(
            "memory needs a window of at least 2 entries: give cache_size above "
            f"{sizes.num_sinks + 1} with num_sinks {sizes.num_sinks}, got {sizes.cache_size}"
        )
    if sizes.recall_layers not in (None, ALL):
        by_layer(sizes.recall_layers)
    most, num_recalled = sizes.window_size - 1, sizes.num_recalled
    if num_recalled is None:
        of_sizes = sizes.cache_size, sizes.num_sinks, sizes.recall_places
        num_recalled = min(usual_recalled(*of_sizes), sizes.memory)
    if not 1 <= num_recalled <= most:
        raise UserError(
            f"num_recalled must be between 1 and {most} with cache_size {sizes.cache_size} and "
            f"num_sinks {sizes.num_sinks}, got {num_recalled}"
        )
    if sizes.memory < num_recalled:
        raise UserError(
            f"memory must be at least num_recalled ({num_recalled}), got {sizes.memory}"
        )
    return num_recalled


def usual_recalled(cache_size: int, num_sinks: int, places: RecallBy | None = None) -> int:
    """Default number of entries that a step takes back: a quarter of the cache, at most
    `MOST_RECALLED`, of unknown `places` the less. The window keeps at least one entry.
    """
    most = MOST_RECALLED[places or "rank"]
    return max(1, min(cache_size // 4, most, cache_size - num_sinks - 1))


def usual_places(family: str) -> RecallBy:
    """Return where entries lie that are taken back, if nothing was measured: by age where positions
    are free, by rank where later ones cost something.
    """
    return "rank" if family == "learned" else "age"


def layer_bias_of(text: str | None, attention: Sequence[int]) -> dict[int, float]:
    """Return what is added to the scores of entries taken back, by layer that is asked for;
    None: all that have attention, as they are. UserError if one has none.
    """
    layer_bias = dict.fromkeys(attention, 0.0) if text is None else by_layer(text)
    if others := layer_bias.keys() - {*attention}:
        raise UserError(
            f"{NAME} must be among the {len(attention)} layers that have attention, up to "
            f"{attention[-1]}: {min(others)} has none"
        )
    return layer_bias


def by_layer(text: str) -> dict[int, float]:
    """Return the layers of `"7,15-29:-2"`, 7 and those from 15 to 29, with 0 and -2; UserError for
    anything else.
    """
    found: dict[int, float] = {}
    for part in typed(NAME, text, str).split(","):
        layers, _, layer_bias = part.partition(":")
        first, _, last = (x.strip() for x in layers.partition("-"))
        ends = (first, last or first)
        if not all(x.isascii() and x.isdigit() and len(x) < 6 for x in ends):
            raise UserError(f"{NAME} must be numbers and ranges as 7,15-29, got {text!r:.80}")
        if int(ends[0]) > int(ends[1]):
            raise UserError(f"{NAME} must have ranges that go up, as 15-29, got {text!r:.80}")
        found |= dict.fromkeys(range(int(ends[0]), int(ends[1]) + 1), _number(layer_bias, text))
    return found


def _number(layer_bias: str, text: str) -> float:
    if not layer_bias:
        return 0.0
    with suppress(ValueError):
        if abs(number := float(layer_bias)) <= MOST_BIAS:
            return number
    most = f"{MOST_BIAS:g}"
    raise UserError(f"{NAME} must have a number from -{most} to {most} after :, got {text!r:.80}")
