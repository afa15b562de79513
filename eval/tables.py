"""Tables of results, for pages and terminals: columns, and entries of which the best is marked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvalign.console import Entry
from kvalign.eval.evaluation import Column, Row
from kvalign.eval.rows import grouped, label_of

METHOD = Column("method", digits=None)


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[Column]
    rows: list[list[Entry]]


def table(title: str, rows: list[Row], columns: Mapping[str, Column]) -> Table:
    """A row of results each, the best of every column marked.

    Args:
        title: what the table is of.
        rows: of results.
        columns: by name in the rows; one that none of them has a value of is left out.
    """
    columns = {
        name: column
        for name, column in columns.items()
        if any(row.get(name) is not None for row in rows)
    }
    lines = [[Entry(label_of(row))] for row in rows]
    for name, column in columns.items():
        values = [row.get(name) for row in rows]
        marked = best(values, column.better)
        for i, (line, value) in enumerate(zip(lines, values, strict=True)):
            line.append(Entry(column.text(value), i in marked))
    return Table(title, [METHOD, *columns.values()], lines)


def tables_by_cache(title: str, rows: list[Row], columns: Mapping[str, Column]) -> list[Table]:
    """One table a cache size, so that the best is among methods which keep as much."""
    return [
        table(f"{title}, C = {cache_size}", group, columns)
        for cache_size, group in grouped(rows, "cache_size").items()
    ]


def best(values: list[Any], better: Literal["lower", "higher", ""]) -> set[int]:
    """Indices of the best values; none where no direction is better or all are alike."""
    known = [value for value in values if value is not None]
    if not better or len(set(known)) < 2:
        return set()
    top = min(known) if better == "lower" else max(known)
    return {i for i, value in enumerate(values) if value == top}
