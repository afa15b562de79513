"""Rows of results and the tables made of them, for pages and terminals."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean
from typing import Any, Literal

from kvalign.console import Entry
from kvalign.eval.evaluation import FLOOR, SIZES, Column, Row

METHOD = Column("method", digits=None)


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[Column]
    rows: list[list[Entry]]


def table(title: str, rows: list[Row], columns: Mapping[str, Column]) -> Table:
    """A table of rows of results, the best method of every column marked; a column that none of
    them has a value of is left out.
    """
    shown = [METHOD]
    lines = [[Entry(label_of(row))] for row in rows]
    for name, column in columns.items():
        values = [row.get(name) for row in rows]
        if any(value is not None for value in values):
            shown.append(column)
            judged = [None if row["method"] == FLOOR else row.get(name) for row in rows]
            marked = best(judged, column.better)
            for i, (line, value) in enumerate(zip(lines, values, strict=True)):
                line.append(Entry(column.text(value), i in marked))
    return Table(title, shown, lines)


def tables_by_cache(title: str, rows: list[Row], columns: Mapping[str, Column]) -> list[Table]:
    """One table a cache size, so that the best is among methods which keep as much; texts that no
    method wrote have none.
    """
    return [
        table(f"{title}, C = {cache_size}" if cache_size else title, group, columns)
        for cache_size, group in grouped(rows, "cache_size").items()
    ]


def best(values: list[Any], better: Literal["lower", "higher", ""]) -> set[int]:
    """Indices of the best values; none where no direction is better or all are alike."""
    known = [value for value in values if value is not None]
    if not better or len(set(known)) < 2:
        return set()
    top = min(known) if better == "lower" else max(known)
    return {i for i, value in enumerate(values) if value == top}


def label_of(row: Row) -> str:
    """What a row is called on a page: method, aligner, sinks, and how many it evicts at once; a
    text by its file's name.
    """
    if row["method"] == FLOOR:
        return "bare step (floor)"
    if row["num_sinks"] is None:
        return row["method"]
    evicted = row["num_evicted"]
    several = "" if evicted == 1 or row["method"] == "discard-half" else f", {evicted} at once"
    return f"{method_name(row)}, {row['num_sinks']} sinks{several}"


def method_name(row: Row) -> str:
    return f"{row['method']} ({row['aligner']})" if row["aligner"] else row["method"]


def grouped(rows: Iterable[Row], by: str | Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows by one of their values or what a function says of them, in the order of the first."""
    key = itemgetter(by) if isinstance(by, str) else by
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def means(rows: Iterable[Row], figures: Collection[str], by: Collection[str] = ()) -> list[Row]:
    """One row for all of one method, its sizes and the values of `by`: the figures' means, and the
    number of rows as `num_passages`.
    """
    same = (*SIZES, *by)
    return [
        {name: group[0].get(name) for name in same}
        | {"num_passages": len(group)}
        | {name: fmean(row[name] for row in group) for name in figures}
        for group in grouped(rows, lambda row: tuple(map(row.get, same))).values()
    ]
