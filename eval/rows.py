"""Rows of results: what they are called, grouped, averaged, and as a file."""

import csv
import io
from collections.abc import Collection, Iterable
from statistics import fmean
from typing import Any

from kvalign.eval.evaluation import SIZES, Row


def label_of(row: Row) -> str:
    """What a row is called on a page: method, aligner, sinks, and how many it evicts at once."""
    evicted = row["num_evicted"]
    several = "" if evicted == 1 or row["method"] == "discard-half" else f", {evicted} at once"
    return f"{method_name(row)}, {row['num_sinks']} sinks{several}"


def method_name(row: Row) -> str:
    return f"{row['method']} ({row['aligner']})" if row["aligner"] else row["method"]


def grouped(rows: Iterable[Row], name: str) -> dict[Any, list[Row]]:
    """Rows by one of their values, in the order in which the values come."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups


def means(rows: Iterable[Row], figures: Collection[str], by: Collection[str] = ()) -> list[Row]:
    """One row for all of one method, its sizes and the values of `by`: the figures' means, and the
    number of rows as `num_passages`.
    """
    same = (*SIZES, *by)
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in same), []).append(row)
    return [
        dict(zip(same, values, strict=True))
        | {"num_passages": len(group)}
        | {name: fmean(row[name] for row in group) for name in figures}
        for values, group in groups.items()
    ]


def as_csv(rows: list[Row]) -> str:
    """The rows without the columns that hold lists or passages."""
    names = [name for row in rows for name, value in row.items() if _is_plain(name, value)]
    file = io.StringIO()
    writer = csv.DictWriter(file, dict.fromkeys(names), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _is_plain(name: str, value: Any) -> bool:
    return name != "text" and not isinstance(value, list | tuple | dict)
