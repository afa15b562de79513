"""Rows of results and the tables made from them, for pages and terminals, with verdicts on a method
relative to the reference, by plain rules with fixed limits.

An aligner's name in a row is as short as possible, but different from others beside it. A shipped
aligner, or one in `kvalign-data/MODEL`, is called by its last part (`table`), unless another has
that name. Other aligners are called by the differing end of their path (`a-table`, `x/table`), else
by the whole path with its revision. What an aligner corrects stands behind any of these names
unless that is all: `a-table: keys`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import PurePath
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from kvalign import checkpoints
from kvalign.aligners.kinds import often
from kvalign.cache.memory_sizes import usual_recalled
from kvalign.cache.sizes import num_evicted_of
from kvalign.eval.protocol.data import FLOOR, PEER, SIZES, Column, Row, Table
from kvalign.foundation.errors import escape_controls
from kvalign.foundation.folders import ROOT
from kvalign.foundation.statistics import MIN_LABELS, apart
from kvalign.policies import OLDEST

if TYPE_CHECKING:
    from rich.console import Console

METHOD = Column("method", digits=None)
TOO_FEW = (
    f"No intervals: they need {MIN_LABELS} labels or more (--num-tokens). Without them "
    "differences may be chance."
)
MIN_POINT = 20  # labels of a point in a plot: fewer show one label's luck
GIVE_OR_TAKE = 1.1  # an interval of the ratio that holds 1 and ends above it says nothing
FAR = 1.25  # a ratio above it is a failure, not a price
SLOW = ("recompute", "dense")  # re-encodes all for each token; stops at the context length
WITHOUT_SINKS = ("window", "dense")  # methods whose sinks nobody chooses: none, and all entries
MEANING = (
    "As good: the 95 % interval of the ratio contains 1 or lies below it, and ends below "
    f"{GIVE_OR_TAKE:g}. Worse: it lies above 1. Failing: it lies above 1, and the ratio is "
    f"above {FAR:g}."
)


class RatioVerdict(StrEnum):
    """Verdict on a ratio to the reference and its 95 % interval; the worst comes first."""

    FAILS = "fails"  # the interval lies above 1, and the ratio far above
    WORSE = "worse"  # it lies above 1
    OPEN = "too few labels to tell"  # it holds 1 and reaches far above
    UNKNOWN = "too few labels"  # there is no interval
    GOOD = "as good"  # it holds 1, narrowly, or lies below


def verdict(row: Row) -> RatioVerdict:
    """Return the verdict on a row with `ratio`, `ratio_low`, `ratio_high`."""
    low, high = row.get("ratio_low"), row.get("ratio_high")
    if low is None or high is None:
        return RatioVerdict.UNKNOWN
    if low > 1:
        return RatioVerdict.FAILS if row["ratio"] > FAR else RatioVerdict.WORSE
    return RatioVerdict.GOOD if high <= GIVE_OR_TAKE else RatioVerdict.OPEN


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


def table(
    title: str, rows: list[Row], columns: Mapping[str, Column], reference: str | None = None
) -> Table:
    """Table of rows of results, with the best method of every column marked, among rows with equal
    sinks (`comparable`). A column without values is left out. A `reference` that is
    no candidate (`SLOW`) cannot be the best where others are relative to it.
    """
    from kvalign.foundation.console import Entry  # rich, which no command's --help needs

    headings = [METHOD]
    lines = [[Entry(label_of(row))] for row in rows]
    fair = {id(row) for row in comparable([row for row in rows if row["method"] != FLOOR])}
    for name, column in columns.items():
        values = [row.get(name) for row in rows]
        if any(value is not None for value in values):
            headings.append(column)
            measure = reference if column.by_reference and reference in SLOW else None
            out = [id(row) not in fair or is_reference(row, measure) for row in rows]
            judged = [None if x else row.get(name) for row, x in zip(rows, out, strict=True)]
            spans = [column.interval(row) for row in rows]
            marked = best(judged, column.better, spans)
            for i, (line, value) in enumerate(zip(lines, values, strict=True)):
                line.append(Entry(column.text(value), i in marked, _range(column, spans[i])))
    intervals = [column.interval(row) for column in columns.values() for row in rows]
    too_few = any(interval and not math.isfinite(interval[1]) for interval in intervals)
    return Table(title, headings, lines, TOO_FEW if too_few else "")


def _range(column: Column, interval: tuple[float, float] | None) -> str:
    """An interval as it stands beside its figure; that of the reference by itself is none."""
    if interval is None or not math.isfinite(interval[1]) or interval[0] == interval[1]:
        return ""
    return "\N{EN DASH}".join(map(column.text, interval))


def best(
    values: list[Any],
    better: Literal["lower", "higher", ""],
    intervals: Sequence[tuple[float, float] | None],
) -> set[int]:
    """Index of the best value, if its interval overlaps no other; without an interval of each, or
    if no direction is better, there is none.
    """
    numbers = [i for i, value in enumerate(values) if value is not None]
    if not better or len(numbers) < 2:
        return set()
    top = (min if better == "lower" else max)(numbers, key=values.__getitem__)
    span, others = intervals[top], [intervals[i] for i in numbers if i != top]
    return {top} if span and all(one and apart(span, one) for one in others) else set()


def label_of(row: Row) -> str:
    """Return the name of a row on a page; for a text its file name."""
    if row["method"] == FLOOR:
        return "bare step (floor)"
    if row["num_sinks"] is None:
        return row["method"]
    name, evicted, recent = method_name(row), row["num_evicted"], row.get("num_recent")
    half = num_evicted_of("half", row["cache_size"] - row["num_sinks"]) if evicted else None
    usual = {"discard-half": half, PEER: evicted}.get(row["method"], 1)  # which need not be said
    several = "" if evicted == usual else f", {evicted} at once"
    is_usual = not recent or recent == (row["cache_size"] - row["num_sinks"]) // 4
    newest = "" if is_usual else f", {recent} newest stay"
    return f"{name}{sinks_in(row)}{several}{newest}"


def sinks_in(row: Row) -> str:
    """The sinks in a row's label."""
    return ", 1 sink" if row["num_sinks"] == 1 else f", {row['num_sinks']} sinks"


PAPERS = "network"  # the kind of the paper's aligners


def method_name(row: Row) -> str:
    aligner, kind = row["aligner"], (row.get("aligner_label") or row["aligner"] or "").split(":")[0]
    if kind == PAPERS:
        aligner = f"the paper's {aligner}"
    name = f"{row['method']} ({aligner})" if aligner else row["method"]
    policy = row.get("policy") or OLDEST
    note = " positions kept" if row.get("positions") == "keep" else ""
    name = f"{name}, {policy}{note}" if note or policy != OLDEST else name
    if row.get("cache_dtype") not in (None, "model"):
        name = f"{name}, {row['cache_dtype']}"
    if not row.get("memory"):
        return name
    of_row = row["cache_size"], row["num_sinks"], row.get("recall_places")
    is_usual = row["num_recalled"] == usual_recalled(*of_row)
    suffix = "" if is_usual else f", {row['num_recalled']} recalled"
    return f"{name}, memory {row['memory']}{suffix}"


def grouped(rows: Iterable[Row], by: str | Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows grouped by one of their values or by a function of them, in order of occurrence."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[by] if isinstance(by, str) else by(row), []).append(row)
    return groups


def means(
    rows: Iterable[Row],
    figures: Collection[str],
    by: Collection[str] = (),
    sums: Collection[str] = (),
) -> list[Row]:
    """Row of means over all rows of one method, its sizes and the values of `by`: means of the
    figures, sums of counts, and the number of rows.
    """
    same = (*SIZES, *by)
    return [
        {name: group[0].get(name) for name in same}
        | {"num_passages": len(group)}
        | {name: fmean(row[name] for row in group) for name in figures}
        | {name: sum(row[name] for row in group) for name in sums}
        for group in grouped(rows, lambda row: tuple(map(row.get, same))).values()
    ]


def csv_of(rows: Sequence[Row]) -> str:
    """Rows as CSV, without the columns that hold lists or passages."""
    import pandas as pd

    table = pd.DataFrame(rows, dtype=object).drop(columns="text", errors="ignore")
    nested = table.map(lambda value: isinstance(value, list | tuple | dict)).any()
    return str(table.loc[:, ~nested].to_csv(index=False, lineterminator="\n"))


_FACTS = ("aligner_label", "aligner_path", "aligner_revision")


def identity_of(row: Row) -> Hashable:
    """Return the fields that identify a row, whatever the name of its aligner in a document."""
    return _aligner_of(row), *(row.get(x) for x in SIZES if not x.startswith("aligner"))


def names_of(rows: Sequence[Row]) -> list[str | None]:
    """Name for the aligner of each row, the same for the same aligner, and different for two; None
    for rows without one. It includes how often it realigns.
    """
    forms = {_aligner_of(row): _forms(row) for row in rows if row["aligner"]}
    while True:
        number = Counter(names[0] for names in forms.values())
        clashing = [names for names in forms.values() if number[names[0]] > 1 and len(names) > 1]
        if not clashing:
            break
        for names in clashing:
            del names[0]
    return [
        row["aligner"] and often(forms[_aligner_of(row)][0], row.get("realign_every") or 1)
        for row in rows
    ]


def renamed(rows: Iterable[Row]) -> list[Row]:
    """Rows with the names that their aligners get beside each other."""
    rows = list(rows)
    return [row | {"aligner": name} for row, name in zip(rows, names_of(rows), strict=True)]


def _aligner_of(row: Row) -> Hashable:
    """Return what tells an aligner from others; in documents without a label its name."""
    label, path, revision = map(row.get, _FACTS)
    kind = (label or row["aligner"] or "").partition(": ")[0]  # weights decide what it corrects
    return kind, revision or path


def _forms(row: Row) -> list[str]:
    """Names of a row's aligner, the short ones first."""
    label, path, revision = map(row.get, _FACTS)
    if label is None or path is None:
        return [f"untrained {label}" if label else row["aligner"]]
    parts = PurePath(path).parts
    ends = [PurePath(*parts[-n:]).as_posix() for n in range(1, len(parts) + 1)]
    _, colon, targets = label.partition(": ")
    ends = [f"{end}{colon}{targets}" for end in (*ends, f"{path}@{revision}")]
    is_ours = checkpoints.aligner_path(path) or parts[-3:-2] == (ROOT.name,)
    return [*([label] if is_ours or not parts else []), *ends]


ARROWS = {"lower": " ↓", "higher": " ↑", "": ""}


def print_tables(tables: list[Table], console: Console | None = None) -> None:
    """Print tables. Where the console is too narrow for one, it has no intervals; where this is not
    enough, each row is a card.
    """
    from rich.text import Text

    from kvalign.foundation.console import Heading, console_for, fits, print_cards, print_table

    console = console or console_for()
    for table in tables:
        titles = [column.title + ARROWS[column.better] for column in table.columns]
        bare = [[replace(entry, more="") for entry in row] for row in table.rows]
        rows = table.rows if fits(titles, table.rows, console.width) else bare
        notes = [table.note]
        if fits(titles, rows, console.width):
            headings = [Heading(t, c.is_number) for t, c in zip(titles, table.columns, strict=True)]
            print_table(headings, rows, title=table.title, console=console)
            if rows != table.rows:
                notes.insert(0, f"without intervals, which need more than {console.width} columns")
        else:
            console.print(Text(escape_controls(table.title), "bold"))
            print_cards(titles, table.rows, console)
        for note in filter(None, notes):
            console.print(Text(note, "dim"))


def print_meanings(tables: list[Table]) -> None:
    """Print the meaning of the tables' columns and of the mark of the best."""
    from rich.text import Text

    from kvalign.foundation.console import console_for

    means = {column.title: column.about for table in tables for column in table.columns}
    if any(entry.is_best for table in tables for row in table.rows for entry in row):
        means["★"] = "the best of its column with equal sinks: its interval overlaps no other"
    console = console_for()
    for title, about in means.items():
        if about:
            console.print(Text(f"{title}: {about}", "dim"))
