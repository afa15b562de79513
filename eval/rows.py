"""Rows of results as a table: for the terminal, for a file, and averaged."""

from typing import Any

import pandas as pd

from kvalign.eval.metrics import METRICS

_NESTED = ("quarters", "segments", "chunks", "text")
_PLACES = ("prompt", "answer", "num_fed")  # where in a run a row is


def label_of(row: dict[str, Any]) -> str:
    """What a row is called on a page: method, aligner, sinks, and how many it evicts at once."""
    evicted = row["num_evicted"]
    several = "" if evicted == 1 or row["method"] == "discard-half" else f", {evicted} at once"
    return f"{method_name(row)}, {row['num_sinks']} sinks{several}"


def method_name(row: dict[str, Any]) -> str:
    return f"{row['method']} ({row['aligner']})" if row["aligner"] else row["method"]


def as_text(rows: list[dict[str, Any]]) -> str:
    """An aligned table with the digits that mean something."""
    table = flat(rows)
    if "aligner" in table:
        table["aligner"] = table["aligner"].astype(object).where(table["aligner"].notna(), "")
    formatters = {name: metric.text for name, metric in METRICS.items() if name in table}
    return table.to_string(index=False, formatters=formatters)


def flat(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows without the columns that hold lists or passages."""
    return pd.DataFrame(rows).drop(columns=list(_NESTED), errors="ignore")


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for those that differ in their place alone (prompt, answer): the metrics' means, and
    the number of rows as `num_passages`.
    """
    table = flat(rows).drop(columns=list(_PLACES), errors="ignore")
    measured = {*METRICS, "num_tokens", "num_chunks"}
    cell = [name for name in table if name not in measured]
    grouped = table.groupby(cell, sort=False, dropna=False)
    found = grouped.mean()
    found.insert(0, "num_passages", grouped.size())
    found = found.reset_index().astype(object)
    records = found.where(found.notna(), None).to_dict("records")
    return [{str(name): value for name, value in row.items()} for row in records]
