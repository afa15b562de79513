"""Few of all combinations, in which each pair of values that matters still comes up."""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from helpers.tiny_models import KINDS
from kvalign.models.architectures import FAMILIES


def covering(
    cases: Iterable[tuple[Any, ...]],
    *aspects: Callable[..., Hashable],
    but: Iterable[tuple[Any, ...]] = (),
) -> list[tuple[Any, ...]]:
    """A few of `cases` in which every value of every aspect, a function of a case's values, comes
    up beside those that do so in `but`: greedily the case that shows most of what none before it
    did; of those alike, the one whose values came up least.
    """
    shown = [(case, [(i, aspect(*case)) for i, aspect in enumerate(aspects)]) for case in cases]
    there = [(i, aspect(*case)) for case in but for i, aspect in enumerate(aspects)]
    missing = {value for _, values in shown for value in values} - set(there)
    chosen, times = [], Counter[Hashable](there)
    while missing:
        case, values = max(
            shown, key=lambda x: (len(missing.intersection(x[1])), -sum(times[y] for y in x[1]))
        )
        chosen.append(case)
        times.update(values)
        missing.difference_update(values)
    return chosen


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows of the product of `axes` with every pair of values of any two axes."""
    pairs = itertools.combinations(range(len(axes)), 2)
    aspects = [lambda *case, i=i, j=j: (case[i], case[j]) for i, j in pairs]
    return covering(itertools.product(*axes), *aspects)


def of_each_family(
    names: Iterable[Any], but: Iterable[tuple[Any, str]] = ()
) -> list[tuple[Any, str]]:
    """Each of `names` with an architecture of each family, and every architecture, beside `but`."""
    features = lambda name, kind: (name, FAMILIES[kind]), lambda _, kind: kind
    return covering(itertools.product(names, KINDS), *features, but=but)


def one_of_each(*axes: Iterable[Any], but: Iterable[tuple[Any, ...]] = ()) -> list[tuple[Any, ...]]:
    """Rows of the product of `axes` with every value of each, as evenly as may be, beside `but`."""
    aspects = [lambda *case, i=i: case[i] for i in range(len(axes))]
    return covering(itertools.product(*axes), *aspects, but=but)
