"""What is seen in each plot of the report: one sentence made of its numbers."""

import math
from collections.abc import Sequence
from statistics import fmean

from kvalign.eval.protocol.evaluation import FLOOR, Row
from kvalign.eval.protocol.tables import grouped, label_of
from kvalign.eval.protocol.verdicts import (
    DRIFT_LABELS,
    FAR,
    Verdict,
    drifts,
    in_words,
    listed,
    readable_apart,
    spread,
    verdict,
)

SINK = 5  # times its even share that the first entry gets at least where it is a sink
NEAR_RIGHT = 0.02  # of the share of right answers
NEAR = 1.05  # of the lowest perplexity: as good for the choice of the cheapest


def by_size(rows: Sequence[Row], reference: str | None) -> str:
    """Which methods are as good as the reference at every cache size, and which fail at one."""
    if not reference:
        last = max(row["cache_size"] for row in rows)
        low = min((r for r in rows if r["cache_size"] == last), key=lambda r: r["perplexity"])
        return f"Lowest at C = {last}: {_name(low)} ({low['perplexity']:.1f})."
    others = grouped([row for row in rows if row["method"] != reference], _name)
    good = [x for x, rows in others.items() if {*map(verdict, rows)} == {Verdict.GOOD}]
    failing = {x: [r for r in g if verdict(r) is Verdict.FAILS] for x, g in others.items()}
    fails = [
        f"{label} ({spread((row['ratio'] for row in group), 2)} times)"
        for label, group in failing.items()
        if group
    ]
    said = [f"As good as {reference} at every C: {listed(good)}." if good else ""]
    said += [f"Far above {reference}: {listed(fails)}." if fails else ""]
    if any(said):
        return " ".join(filter(None, said))
    ratios = [row["ratio"] for group in others.values() for row in group]
    told = f"none is shown to be as good at every C, none to be above {FAR:g}"
    return f"{spread(ratios, 2)} times {reference}'s: {told}." if ratios else ""


def by_drift(rows: Sequence[Row], reference: str | None) -> str:
    """Of which methods an error adds up, by the rule that the findings have (`drifts`)."""
    if not reference:
        return "Without a reference the lines hold the text's own ups and downs."
    rows = [row for row in rows if row.get("drift") is not None]
    if not rows:
        return ""
    if (num_labels := rows[0]["num_labels"]) < DRIFT_LABELS:
        return f"{num_labels} labels are too few to tell of drift, which takes {DRIFT_LABELS}."
    growing = [
        f"{_name(row)} (at C = {row['cache_size']} drift {row['drift']:.2f})"
        for row in rows
        if drifts(row)
    ]
    if growing:
        return f"An error adds up: {listed(growing)}."
    return f"No error is shown to add up: drift is {spread((row['drift'] for row in rows), 2)}."


def recall(rows: Sequence[Row], reference: str | None) -> str:
    """Who has lost what the cache could hold: the ratio on bigrams in the oldest quarter of C by
    that on new ones, where their intervals are apart; without a reference both perplexities.
    """
    if reference is None:
        last = max(row["cache_size"] for row in rows)
        said = [
            f"{_name(row)} {old['perplexity'] or math.nan:.1f} and {new['perplexity']:.1f}"
            for row in rows
            for old, new in [_oldest_and_new(row)]
            if row["cache_size"] == last and new["perplexity"]
        ]
        return f"At C = {last}, bigrams of 0.75 to 1 C tokens back and new ones: {listed(said)}."
    lost: dict[str, list[str]] = {}
    for row in rows:
        old, new = _oldest_and_new(row)
        ends = [(one["ratio_low"], one["ratio_high"]) for one in (old, new)]
        if row["method"] == reference or None in (*ends[0], *ends[1]):
            continue
        if ends[0][0] > ends[1][1]:
            figures = f"{old['ratio']:.2f} against {new['ratio']:.2f} at C = {row['cache_size']}"
            lost.setdefault(_name(row), []).append(figures)
    what = "on bigrams of 0.75 to 1 C tokens back"
    if not lost:
        return f"No method is shown to be further from {reference} {what} than on new ones."
    said = [f"{label} {', '.join(figures)}" for label, figures in lost.items()]
    return f"Further from {reference} {what} than on new ones: {'; '.join(said)}."


def _oldest_and_new(row: Row) -> tuple[Row, Row]:
    """The slice of the oldest quarter of C, and that of new bigrams."""
    slices = {(one["from"], one["to"]): one for one in row["bigrams"]}
    return slices[0.75, 1.0], slices[None, None]


def sinks(rows: Sequence[Row]) -> str:
    """Whether the model has attention sinks, and what its queries look at once they are gone."""
    said = []
    for size, group in grouped(rows, "cache_size").items():
        row, even = group[0], 100 / (size + 1)
        share, low, high = (
            row[name] for name in ("first_before", "first_before_low", "first_before_high")
        )
        num_layers = len(row["before"]["by_head"])
        layers = f"layers 3 to {num_layers}" if num_layers > 3 else "all layers"
        found = "an attention sink" if low > SINK * even else "no sink"
        after = [f"{_name(row)} {row['first_after']:.1f} %" for row in group]
        said.append(
            f"C = {size}: before an eviction {share:.1f} % (95 %: {low:.1f} to {high:.1f}) of the "
            f"attention of {layers} goes to the first entry, {found} (even: {even:.1f} %); after, "
            f"to the first that is kept: {listed(after)}."
        )
    return " ".join(said)


def sink_layers(rows: Sequence[Row]) -> str:
    """How many layers have a sink, before and after."""
    said = []
    for size, group in grouped(rows, "cache_size").items():
        maps = {"before": group[0]["before"]} | {_name(row): row["after"] for row in group}
        shares = {label: [fmean(heads) for heads in m["by_head"]] for label, m in maps.items()}
        even = 400 / (size + 1)
        num = {label: sum(x > SINK * even for x in found) for label, found in shares.items()}
        counts = [f"{label} {n}" for label, n in num.items()]
        most = max(shares["before"])
        said.append(
            f"C = {size}: of {len(shares['before'])} layers, those that give the first four more "
            f"than {SINK} times an even share: {', '.join(counts)}; most before: layer "
            f"{shares['before'].index(most) + 1}, {most:.0f} %."
        )
    return " ".join(said)


def by_time(rows: Sequence[Row]) -> str:
    """The least time for a perplexity near the lowest."""
    low = min(rows, key=lambda row: row["perplexity"])
    near = [row for row in rows if row["perplexity"] <= NEAR * low["perplexity"]]
    fast = min(near, key=lambda row: row["seconds"])
    near_by = f"within {100 * (NEAR - 1):.0f} % of it"
    if fast is low:
        return f"Lowest, and the fastest of those {near_by}: {_point(low)}."
    return f"Lowest: {_point(low)}. The fastest of those {near_by}: {_point(fast)}."


def _point(row: Row) -> str:
    figures = f"{row['perplexity']:.1f} in {row['seconds']:.2g} s"
    return f"{_name(row)} at C = {row['cache_size']} ({figures})"


def cost(rows: Sequence[Row]) -> str:
    """The cheapest and the dearest step."""
    methods = [row for row in rows if row["method"] != FLOOR]
    name = "bare_mean_ratio" if all("bare_mean_ratio" in row for row in methods) else "ratio"
    by = "the bare step's" if name != "ratio" else "the reference's"
    ranked = sorted(grouped(methods, _name).items(), key=lambda item: sum(r[name] for r in item[1]))
    spans = [f"{label} ({spread((r[name] for r in group), 2)})" for label, group in ranked]
    ends = f"cheapest {spans[0]}, dearest {spans[-1]}" if len(spans) > 1 else spans[0]
    return f"Time of a step by {by}: {ends}."


def by_batch(rows: Sequence[Row]) -> str:
    """How much a method gains from the smallest batch to the largest."""
    gains: dict[str, list[float]] = {}
    first, last = min(r["batch_size"] for r in rows), max(r["batch_size"] for r in rows)
    for (label, _), group in grouped(rows, lambda r: (_name(r), r["cache_size"])).items():
        at = {row["batch_size"]: row["tokens_per_s"] for row in group}
        if first in at and last in at:
            gains.setdefault(label, []).append(at[last] / at[first])
    spans = [f"{label} {spread(values, 1)}" for label, values in gains.items()]
    return f"Batch {last} by batch {first}, tokens/s: {'; '.join(spans)}."


def answers(rows: Sequence[Row]) -> str:
    """How far back exact answers reach."""
    right = {
        label: [row["distance_lines"] for row in group if row["accuracy"] >= 0.5]
        for label, group in grouped(rows, _name).items()
    }
    if not any(row["accuracy"] for row in rows):
        return "No answer is right with any method, so these losses are no merit."
    far = [f"{label} to {max(lines)}" for label, lines in right.items() if lines]
    if not far:
        most = max(row["accuracy"] for row in rows)
        return f"No method answers half of the queries of any distance: {most:.2f} at most."
    return f"Half of the answers or more are right, lines back: {'; '.join(far)}."


def recalled(rows: Sequence[Row]) -> str:
    """Which methods answer as re-encoding does in the oldest quarter of the cache, at every size,
    and which do not.
    """
    base = {row["cache_size"]: row["oldest"] for row in rows if row["method"] == "recompute"}
    groups = grouped([row for row in rows if row["method"] != "recompute"], _name)
    spans = {x: f"{x} ({spread((r['oldest'] for r in g), 2)})" for x, g in groups.items()}
    where = "Right answers in the oldest quarter of the cache"
    if len(base) < len({row["cache_size"] for row in rows}) or not groups:
        return f"{where}: {'; '.join(spans.values())}." if groups else ""
    near, below = list[str](), list[str]()
    for label, group in groups.items():
        is_near = all(r["oldest"] >= base[r["cache_size"]] - NEAR_RIGHT for r in group)
        (near if is_near else below).append(spans[label])
    points = f"{100 * NEAR_RIGHT:.0f} points of recompute ({spread(base.values(), 2)})"
    said = [f"within {points}: {listed(near)}" if near else ""]
    said += [f"not within {points if not near else 'them'}: {listed(below)}" if below else ""]
    return f"{where}: {'; '.join(filter(None, said))}."


def readable(rows: Sequence[Row], what: str = "chunks") -> str:
    """The most and the least readable, by rows with `readable` and `num_chunks`."""
    ranked = sorted(rows, key=lambda row: -row["readable"])
    first, last = ranked[0], ranked[-1]
    shares = [f"{100 * row['readable']:.0f} %" for row in (first, last)]
    if len(rows) == 1 or shares[0] == shares[1]:
        return f"Readable {what}: {shares[0]}{' of each' * (len(rows) > 1)}."
    few = "" if readable_apart(first, last) else ", too few to tell them apart"
    return f"Readable {what}: {shares[0]} ({_name(first)}) to {shares[1]} ({_name(last)}){few}."


def _name(row: Row) -> str:
    return in_words(label_of(row))
