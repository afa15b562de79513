"""Conclusions: results in sentences with their numbers, by the rules of `verdicts`. If the figures
do not decide, the sentence says so.
"""

import math
from collections.abc import Iterable, Sequence
from operator import itemgetter
from statistics import fmean

from kvalign.eval.protocol.evaluation import FLOOR, Row
from kvalign.eval.protocol.tables import grouped, label_of
from kvalign.eval.protocol.verdicts import (
    DRIFT_LABELS,
    Verdict,
    apart,
    comparable,
    drifts,
    is_reference,
    readable_apart,
    verdict,
)

SINK = 5  # times its even share that the first entry gets at least where it is a sink
NEAR_RIGHT = 0.02  # of the share of right answers
NEAR = 1.05  # of the lowest perplexity: as good for the choice of the cheapest
UNEQUAL = "Rows with unequal sinks do not compare."
BUSY_FROM = 1.2  # mean of a bare step by its median
BUSY = (
    "The machine was busy (the mean of a bare step is {:.1f} times its median), so times are not "
    "compared: measure again."
)
BESIDE = "recompute"  # what is written is compared with what this writes


def in_words(row: Row) -> str:
    """Return the name of a row in a sentence."""
    return label_of(row).replace(", ", " with ", 1)


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def spread(values: Iterable[float], digits: int) -> str:
    """The smallest and the largest of figures, or the one that all equal."""
    texts = dict.fromkeys(f"{value:.{digits}f}" for value in sorted(values))
    return " to ".join([*texts][:: max(1, len(texts) - 1)])


def spans(rows: Iterable[Row], name: str, digits: int, unit: str = "") -> list[str]:
    """Each method with the smallest and the largest of a figure."""
    groups = grouped(rows, in_words)
    figures = [spread((row[name] for row in group), digits) for group in groups.values()]
    return [f"{label} ({figure}{unit})" for label, figure in zip(groups, figures, strict=True)]


def spans_at(
    rows: Iterable[Row], sizes: Sequence[int], name: str = "ratio", with_interval: bool = False
) -> str:
    """Same, with the cache sizes unless all are meant, and the ends of the ratios' intervals."""
    parts = []
    for label, group in grouped(rows, in_words).items():
        own = sorted({row["cache_size"] for row in group})
        at = f" at C = {', '.join(map(str, own))}" if own != [*sizes] else ""
        figures = f"{name} {spread((row[name] for row in group), 3)}"
        if with_interval:
            low, high = min(r["ratio_low"] for r in group), max(r["ratio_high"] for r in group)
            figures += f" (95 %: {low:.3f} to {high:.3f})"
        parts.append(f"{label}{at}, {figures}")
    return "; ".join(parts)


def compared(rows: Sequence[Row], reference: str, with_ratios: bool = False) -> str:
    """Methods that equal the reference at every cache size, and those that fail at one."""
    others = [row for row in rows if not is_reference(row, reference)]
    verdicts = {x: [*map(verdict, group)] for x, group in grouped(others, in_words).items()}
    if all({*marks} == {Verdict.UNKNOWN} for marks in verdicts.values()):
        return f"too few labels to distinguish any method from {reference}"
    every = "" if len({row["cache_size"] for row in others}) == 1 else " at every C"
    good = [label for label, marks in verdicts.items() if {*marks} == {Verdict.GOOD}]
    who = f"{listed(good)} {'is' if len(good) == 1 else 'are'}"
    claim = f"{who if good else 'no method is shown to be'} as good as {reference}{every}"
    failing = [row for row in others if verdict(row) is Verdict.FAILS]
    if with_ratios and not good and not failing:
        return f"{claim} ({spread((row['ratio'] for row in others), 2)} times)"
    fails = spans(failing, "ratio", 2, " times") if with_ratios else [*grouped(failing, in_words)]
    return f"{claim}; {listed(fails)} {'fails' if len(fails) == 1 else 'fail'}" if fails else claim


def lowest(rows: Iterable[Row]) -> str:
    """Method with the lowest perplexity at each cache size, of those with equal sinks; "" if there
    are none.
    """
    parts = []
    for size, group in grouped(comparable([*rows]), "cache_size").items():
        low, *others = sorted(group, key=itemgetter("perplexity"))
        ends, *of_others = [(r["low"], r["high"] or math.inf) for r in (low, *others)]
        tied = sum(not apart(ends, other) for other in of_others)
        more = f", its interval overlaps {tied} more" if tied else ""
        parts.append(f"{in_words(low)} at C = {size} ({low['perplexity']:.1f}{more})")
    return "; ".join(parts)


def by_size(rows: Sequence[Row], reference: str | None) -> str:
    """Return the comparison of methods at all cache sizes, or the best one at each."""
    if not reference:
        return f"Lowest: {best}." if (best := lowest(rows)) else UNEQUAL
    if all(is_reference(row, reference) for row in rows):
        return ""
    fair = comparable(rows, reference)
    if all(is_reference(row, reference) for row in fair):
        return UNEQUAL
    return f"Here {compared(fair, reference, with_ratios=True)}."


def by_drift(rows: Sequence[Row], reference: str | None) -> str:
    """Return the methods whose errors accumulate (`drifts`)."""
    if not reference:
        return "Without a reference the lines also show the ups and downs of the text itself."
    rows = [row for row in rows if row.get("drift") is not None]
    if not rows:
        return ""
    if (num_labels := rows[0]["num_labels"]) < DRIFT_LABELS:
        return f"{num_labels} labels are too few to measure drift, which needs {DRIFT_LABELS}."
    if growing := [row for row in rows if drifts(row)]:
        sizes = sorted({row["cache_size"] for row in rows})
        return f"Errors accumulate: {spans_at(growing, sizes, 'drift')}."
    return (
        f"No errors are shown to accumulate: drift is {spread((row['drift'] for row in rows), 2)}."
    )


def recall(rows: Sequence[Row], reference: str | None) -> str:
    """Methods that have forgotten text which the cache could hold: the ratio on bigrams in the
    oldest quarter of C is relative to that on new ones, if their intervals do not overlap. Without
    a reference it uses both perplexities.
    """
    by_ends = [{(one["from"], one["to"]): one for one in row["bigrams"]} for row in rows]
    slices_of = [
        (in_words(row), row, slices[0.75, 1.0], slices[None, None])
        for row, slices in zip(rows, by_ends, strict=True)
    ]
    if reference is None:
        last = max(row["cache_size"] for row in rows)
        parts = [
            f"{label} {old['perplexity'] or math.nan:.1f} and {new['perplexity']:.1f}"
            for label, row, old, new in slices_of
            if row["cache_size"] == last and new["perplexity"]
        ]
        return f"At C = {last}, bigrams of 0.75 to 1 C tokens back and new ones: {listed(parts)}."
    by_label: dict[str, list[str]] = {}
    for label, row, old, new in slices_of:
        if (old["ratio_low"] or 0) > (new["ratio_high"] or math.inf):
            figures = f"{old['ratio']:.2f} against {new['ratio']:.2f} at C = {row['cache_size']}"
            by_label.setdefault(label, []).append(figures)
    what = "on bigrams of 0.75 to 1 C tokens back"
    if not by_label:
        return f"No method is shown to be further from {reference} {what} than on new ones."
    parts = [f"{label} {', '.join(figures)}" for label, figures in by_label.items()]
    return f"Further from {reference} {what} than on new ones: {'; '.join(parts)}."


def on_old_tokens(rows: Sequence[Row], reference: str | None) -> str:
    """Methods that can read text which the reference has forgotten: ratios on tokens last said
    beyond C whose intervals lie below 1.
    """
    if reference is None:
        return ""
    gained: dict[str, list[str]] = {}
    for row in comparable(rows, reference):
        beyond = [one for one in row["tokens"] if (one["from"] or 0) >= 1]
        below = [one["ratio"] for one in beyond if (one["ratio_high"] or math.inf) < 1]
        if below:
            figures = f"{spread(below, 2)} at C = {row['cache_size']}"
            gained.setdefault(in_words(row), []).append(figures)
    what = f"below {reference} on tokens last said beyond C"
    parts = [f"{label} {', '.join(figures)}" for label, figures in gained.items()]
    return (
        f"Shown to be {what}: {'; '.join(parts)}." if parts else f"No method is shown to be {what}."
    )


def farthest(rows: Sequence[Row], by: str, what: str) -> str:
    """Methods that are right at the largest distance, which `what` names, of `by` in a row."""
    most = max(row[by] for row in rows)
    last = [row for row in rows if row[by] == most]
    return f"{what.format(most)}: {listed(spans(last, 'accuracy', 2))}."


def sinks(rows: Sequence[Row]) -> str:
    """Return whether the model has attention sinks, and what replaces them when evicted."""
    parts = []
    for size, group in grouped(rows, "cache_size").items():
        first, even = group[0], 100 / (size + 1)
        share, low, high = (first[f"first_before{end}"] for end in ("", "_low", "_high"))
        num_layers = len(first["before"]["by_head"])
        layers = f"layers 3 to {num_layers}" if num_layers > 3 else "all layers"
        which = "an attention sink" if low > SINK * even else "no sink"
        after = [f"{in_words(row)} {row['first_after']:.1f} %" for row in group]
        parts.append(
            f"At C = {size}: before an eviction {share:.1f} % (95 %: {low:.1f} to {high:.1f}) "
            f"of the attention of {layers} goes to the first entry, {which} (even: {even:.1f} "
            f"%); afterwards, to the first kept entry: {listed(after)}."
        )
    return " ".join(parts)


def sink_layers(rows: Sequence[Row]) -> str:
    """Return how many layers have a sink, before and after."""
    parts = []
    for size, group in grouped(rows, "cache_size").items():
        maps = {"before": group[0]["before"]} | {in_words(row): row["after"] for row in group}
        shares = {label: [fmean(heads) for heads in m["by_head"]] for label, m in maps.items()}
        least, most = SINK * 400 / (size + 1), max(shares["before"])
        counts = [f"{label} {sum(x > least for x in means)}" for label, means in shares.items()]
        parts.append(
            f"At C = {size}: of {len(shares['before'])} layers, those that give the first four "
            f"more than {SINK} times an even share: {', '.join(counts)}; most before: layer "
            f"{shares['before'].index(most) + 1}, {most:.0f} %."
        )
    return " ".join(parts)


def by_time(rows: Sequence[Row]) -> str:
    """Least time for a perplexity near the lowest, of rows with equal sinks."""
    if not (rows := comparable(rows)):
        return UNEQUAL
    low = min(rows, key=itemgetter("perplexity"))
    near = [row for row in rows if row["perplexity"] <= NEAR * low["perplexity"]]
    fast = min(near, key=itemgetter("seconds"))
    near_by = f"within {100 * (NEAR - 1):.0f} % of it"
    if fast is low:
        return f"Lowest, and the fastest of those {near_by}: {_point(low)}."
    return f"Lowest: {_point(low)}. The fastest of those {near_by}: {_point(fast)}."


def _point(row: Row) -> str:
    figures = f"{row['perplexity']:.1f} in {row['seconds']:.2g} s"
    return f"{in_words(row)} at C = {row['cache_size']} ({figures})"


def busy(rows: Iterable[Row]) -> float | None:
    """Return the largest mean of a bare step relative to its median, where it shows that the
    machine did something else, too.
    """
    bare = [row for row in rows if row["method"] == FLOOR]
    ratio = max((row["mean_ms"] / row["median_ms"] for row in bare), default=1.0)
    return ratio if ratio > BUSY_FROM else None


def cost(rows: Iterable[Row], fit: Sequence[str] = (), reference: str | None = None) -> str:
    """Return the cost of a step: of methods that are `fit` and of the reference, or of all if that
    is unknown; "" for older rows without a bare step.
    """
    rows = [row for row in rows if row["method"] != FLOOR and row.get("bare_mean_ratio")]
    own_rows = [r for r in rows if not fit or in_words(r) in fit or r["method"] == reference]
    groups = grouped(own_rows, in_words).items()
    times = {label: [row["bare_mean_ratio"] for row in group] for label, group in groups}
    ranked = sorted(times.items(), key=lambda item: fmean(item[1]))
    what = "of those that do not fail" if fit and len(own_rows) < len(rows) else "of all"
    parts = [f"{label} {spread(ratios, 2)}" for label, ratios in ranked]
    rule = f"Mean step {what}, relative to a bare step, which evicts nothing"
    return f"{rule}: {'; '.join(parts)}." if parts else ""


def by_batch(rows: Sequence[Row]) -> str:
    """Return the gain of a method from the smallest batch to the largest."""
    gains: dict[str, list[float]] = {}
    first, last = min(r["batch_size"] for r in rows), max(r["batch_size"] for r in rows)
    for (label, _), group in grouped(rows, lambda r: (in_words(r), r["cache_size"])).items():
        at = {row["batch_size"]: row["tokens_per_s"] for row in group}
        if first in at and last in at:
            gains.setdefault(label, []).append(at[last] / at[first])
    spans = [f"{label} {spread(values, 1)}" for label, values in gains.items()]
    return f"Batch {last} relative to batch {first}, tokens/s: {'; '.join(spans)}."


def answers(rows: Sequence[Row]) -> str:
    """Return how far back exact answers reach."""
    if not (most := max(row["accuracy"] for row in rows)):
        return "No answer is right with any method, so these losses mean little."
    right = grouped([row for row in rows if row["accuracy"] >= 0.5], in_words).items()
    if not right:
        return f"No method answers half of the queries of any distance: {most:.2f} at most."
    far = [f"{label} to {max(row['distance_lines'] for row in group)}" for label, group in right]
    return f"Half of the answers or more are right, lines back: {'; '.join(far)}."


def recalled(rows: Sequence[Row]) -> str:
    """Methods that answer as well as re-encoding in the oldest quarter of the cache, at every size,
    and those that do not; of methods with its sinks.
    """
    base = {row["cache_size"]: row["oldest"] for row in rows if row["method"] == "recompute"}
    fair = comparable(rows, "recompute") if base else rows
    others = [row for row in fair if row["method"] != "recompute"]
    if not others:
        return ""
    where = "Right answers in the oldest quarter of the cache"
    if len(base) < len({row["cache_size"] for row in rows}):
        return f"{where}: {'; '.join(spans(others, 'oldest', 2))}."
    near, below = list[str](), list[str]()
    for group in grouped(others, in_words).values():
        is_near = all(r["oldest"] >= base[r["cache_size"]] - NEAR_RIGHT for r in group)
        (near if is_near else below).extend(spans(group, "oldest", 2))
    points = f"{100 * NEAR_RIGHT:.0f} points of recompute ({spread(base.values(), 2)})"
    parts = [f"within {points}: {listed(near)}"] if near else []
    parts += [f"not within {'them' if near else points}: {listed(below)}"] if below else []
    return f"{where}: {'; '.join(parts)}."


def readable(rows: Sequence[Row], what: str = "chunks") -> str:
    """The most and the least readable method, by rows with `readable` and `num_chunks` and equal
    sinks.
    """
    if not (rows := comparable(rows)):
        return UNEQUAL
    ranked = sorted(rows, key=itemgetter("readable"), reverse=True)
    most, least = (f"{100 * row['readable']:.0f} %" for row in (ranked[0], ranked[-1]))
    if most == least:
        return f"Readable {what}: {most}{' of each' * (len(rows) > 1)}."
    few = "" if readable_apart(ranked[0], ranked[-1]) else ", from too few runs to distinguish them"
    ends = f"{most} ({in_words(ranked[0])}) to {least} ({in_words(ranked[-1])})"
    return f"Readable {what}: {ends}{few}."


def beside(rows: Iterable[Row]) -> str:
    """Methods whose words are more or less readable than those of recompute, with as many sinks; ""
    without both.
    """
    judged = [row for row in comparable([*rows], BESIDE) if row.get("readable_low") is not None]
    base = next((row for row in judged if row["method"] == BESIDE), None)
    others = [row for row in judged if row is not base]
    if not base or not others:
        return ""
    share = base["readable"]
    own = f"{BESIDE}'s {100 * share:.0f} % of {base['num_passages']} passages"
    names: dict[str, list[str]] = {"less": [], "more": []}
    for row in others:
        if readable_apart(row, base):
            side = names["less" if row["readable"] < share else "more"]
            side.append(f"{in_words(row)} {100 * row['readable']:.0f} %")
    none = f"none differs from {own} ({spread((100 * row['readable'] for row in others), 0)} %)"
    parts = [f"{side} readable than {own}: {', '.join(x)}" for side, x in names.items() if x]
    return f"{'; '.join(parts or [none])}."
