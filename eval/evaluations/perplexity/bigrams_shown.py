"""Recall slices in the report: a table and a plot of each by distance (`bigrams.py`)."""

from typing import Any

from kvalign.eval.drawing.plots import draw, panels_by
from kvalign.eval.protocol.conclusions import recall
from kvalign.eval.protocol.evaluation import Column, Document, Drawing, Row
from kvalign.eval.protocol.tables import Table, grouped, table

NEW = "new"  # bigrams that were not there before


def slice_name(one: Row) -> str:
    """What a slice is called: the part of the cache, or of the text before it."""
    if one["from"] is None:
        return NEW
    return f"{one['from']:g}-{one['to']:g} C" if one["to"] else f"over {one['from']:g} C"


def figure(document: Document) -> Drawing | None:
    """The ratio to the reference, or the perplexity, by distance; None of a document without."""
    reference, judged = _judged(document)
    rows = [row for row in document["rows"] if row.get("bigrams")]
    if not rows:
        return None
    points = [
        row | {"x": x, "y": one[judged]} | _ends(one, judged)
        for row in rows
        for x, one in enumerate(row["bigrams"])
        if one[judged] is not None and row["method"] != reference
    ]
    if not points:
        return None
    by = f" by {reference}'s" if reference else ""
    names = [slice_name(one) for one in rows[0]["bigrams"]]
    panels = panels_by("cache_size", points, "C = ", "x", "y", "high", "low")
    y = f"perplexity{by} (lower is better)"
    drawn = draw(panels, x="last there, tokens back", y=y, log_y=True, names=names)
    caption = f"Perplexity{by} of labels that end a bigram, by how far back that was: "
    caption += f"{document['settings']['model']}; bars: 95 %, none below 200 labels"
    return drawn, caption, recall(rows, reference)


def tables(document: Document) -> list[Table]:
    """Of each cache size a table of perplexities, and with a reference one of ratios."""
    reference, model = document["settings"]["reference"], document["settings"]["model"]
    rows = [row for row in document["rows"] if row.get("bigrams")]
    found = []
    for size, group in grouped(rows, "cache_size").items():
        for judged in ("perplexity", "ratio") if reference else ("perplexity",):
            title = f"{model}, C = {size}, {judged} by distance"
            found.append(_table(title, group, judged, reference))
    return found


def _table(title: str, rows: list[Row], judged: str, reference: str | None) -> Table:
    of_rows = rows[0]["bigrams"]
    columns = {
        f"{i}": Column(
            f"{slice_name(one)} ({one['num_labels']})",
            2 if judged == "perplexity" else 3,
            "lower",
            "distance of the bigram's last occurrence, and labels",
            ends=None if reference and judged == "perplexity" else (f"{i}_low", f"{i}_high"),
            by_reference=True,
        )
        for i, one in enumerate(of_rows)
    }
    lines = []
    for row in rows:
        line: dict[str, Any] = dict(row)
        for i, one in enumerate(row["bigrams"]):
            ends = _ends(one, judged) if one[judged] is not None else {}
            line |= {f"{i}": one[judged]} | {f"{i}_{name}": end for name, end in ends.items()}
        lines.append(line)
    return table(title, lines, columns, reference)


def _ends(one: Row, judged: str) -> dict[str, float]:
    """The ends of a figure's interval; the figure itself where labels were too few."""
    low, high = ("ratio_low", "ratio_high") if judged == "ratio" else ("low", "high")
    if one[high] is None:
        return {"low": one[judged], "high": one[judged]}
    return {"low": one[low], "high": one[high]}


def _judged(document: Document) -> tuple[str | None, str]:
    reference = document["settings"]["reference"]
    return reference, "ratio" if reference else "perplexity"
