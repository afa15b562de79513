"""Verdicts on a method relative to the reference, by plain rules with fixed limits."""

import math
from collections.abc import Sequence
from enum import StrEnum
from statistics import fmean, variance

from kvalign.eval.protocol import Row

MIN_LABELS = 200  # fewer have no interval
MIN_POINT = 20  # labels of a point in a plot: fewer show one label's luck
GIVE_OR_TAKE = 1.1  # an interval of the ratio that holds 1 and ends above it says nothing
FAR = 1.25  # a ratio above it is a failure, not a price
MIN_RUNS = 20  # of what is written: fewer, as 4 prompts with 5 seeds each, have no interval
WITHOUT_SINKS = ("window", "dense")  # methods whose sinks nobody chooses: none, and all entries
MEANING = (
    "As good: the 95 % interval of the ratio contains 1 or lies below it, and ends below "
    f"{GIVE_OR_TAKE:g}. Worse: it lies above 1. Failing: it lies above 1, and the ratio is "
    f"above {FAR:g}."
)


class Verdict(StrEnum):
    """Verdict on a ratio to the reference and its 95 % interval; the worst comes first."""

    FAILS = "fails"  # the interval lies above 1, and the ratio far above
    WORSE = "worse"  # it lies above 1
    OPEN = "too few labels to tell"  # it holds 1 and reaches far above
    UNKNOWN = "too few labels"  # there is no interval
    GOOD = "as good"  # it holds 1, narrowly, or lies below


def verdict(row: Row) -> Verdict:
    """Return the verdict on a row with `ratio`, `ratio_low`, `ratio_high`."""
    low, high = row.get("ratio_low"), row.get("ratio_high")
    if low is None or high is None:
        return Verdict.UNKNOWN
    if low > 1:
        return Verdict.FAILS if row["ratio"] > FAR else Verdict.WORSE
    return Verdict.GOOD if high <= GIVE_OR_TAKE else Verdict.OPEN


def comparable(rows: Sequence[Row], reference: str | None = None) -> list[Row]:
    """Rows that can be judged together, since their sinks are equal: those with the number of the
    reference, or without one those with the number that all methods have whose sinks can be chosen.
    If these differ, there are none. `dense` evicts nothing, so it compares with any.
    """
    first = [row for row in rows if is_reference(row, reference)][:1]
    basis = first or [row for row in rows if row["method"] not in WITHOUT_SINKS] or rows
    numbers = {row["num_sinks"] for row in basis}
    if len(numbers) > 1:
        return []
    return [row for row in rows if row["method"] == "dense" or row["num_sinks"] in numbers]


def is_reference(row: Row, reference: str | None) -> bool:
    """Return whether others are relative to this row; rows of the same method with other sinks,
    another policy or memory are relative to it, too.
    """
    return row["method"] == reference and row.get("ratio") in (1.0, None)


def share_interval(share: float, total: float) -> tuple[float, float]:
    """95 % interval of a share of so many independent values (Wilson 1927)."""
    z = 1.96
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    root = math.sqrt(share * (1 - share) / total + (z / (2 * total)) ** 2)
    reach = z * root / (1 + z * z / total)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def share_of(name: str, right: Sequence[bool | float]) -> Row:
    """Share of right answers, of one or more, and its interval: NAME, NAME_low and NAME_high. One
    that is right in part counts as a share. Shares scatter less than answers that are all right or
    all wrong with the same mean, so the interval then reaches rather too far.
    """
    share = sum(map(float, right)) / len(right)
    low, high = share_interval(share, len(right))
    return {name: share, f"{name}_low": low, f"{name}_high": high}


def apart(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether two intervals do not overlap."""
    return one[1] < other[0] or other[1] < one[0]


def runs_interval(shares: Sequence[float], num_chunks: int) -> tuple[float, float] | None:
    """95 % interval of the mean of shares of chunks, one for each run, of so many chunks in all;
    None for fewer than `MIN_RUNS`, or without chunks.

    Chunks of one run are correlated. All together count as the number of independent chunks with
    the same scatter between runs (Korn & Graubard 1998): at least the runs, at most the chunks.
    Runs that are all alike, as when each chunk is readable, show no scatter, so all chunks count
    (Parker et al. 2017, Data Presentation Standards for Proportions).
    """
    num = len(shares)
    if num < MIN_RUNS or not num_chunks:
        return None
    share, of_mean = fmean(shares), variance(shares) / num
    independent = share * (1 - share) / of_mean if of_mean else num_chunks
    z = 1.96
    t = z + (z**3 + z) / (4 * (num - 1))  # Student's, of so few runs, in its first two terms
    return share_interval(share, min(max(independent, num), num_chunks) * (z / t) ** 2)
