"""Recall slices in the report: a table and a plot of each kind by distance (`slices.py`)."""

from functools import partial

from kvalign.eval.drawing import draw, panels_by
from kvalign.eval.evaluations.perplexity import SLICES
from kvalign.eval.protocol import Column, Document, Documents, Drawing, Row, Section, Table
from kvalign.eval.protocol.statistics import MIN_POINT, is_reference
from kvalign.eval.protocol.tables import grouped, table

NEW = "new"  # what was not there before


def sections(documents: Documents) -> list[Section]:
    """A section for each kind of slices."""
    return [
        Section.of(
            documents,
            kind.title,
            kind.about,
            partial(figure, name=name),
            partial(tables, name=name),
            suffix=f"-{kind.title.lower().replace(' ', '-')}",
        )
        for name, kind in SLICES.items()
    ]


def slice_name(one: Row) -> str:
    """Return the name of a slice: the part of the cache, or of the text before it."""
    if one["from"] is None:
        return NEW
    return f"{one['from']:g}-{one['to']:g} C" if one["to"] else f"over {one['from']:g} C"


def figure(document: Document, name: str) -> Drawing | None:
    """Ratio to the reference, or perplexity, by distance, of the slices of that name; None for a
    document without. A point without an interval has no bar.
    """
    reference = document["settings"]["reference"]
    rows = [row for row in document["rows"] if row.get(name)]
    wide = [_wide(row, name, "ratio" if reference else "perplexity") for row in rows]
    points = [
        row | {"x": x, "y": y, "low": row.get(f"low{x}", y), "high": row.get(f"high{x}", y)}
        for row in wide
        if not is_reference(row, reference)
        for x, one in enumerate(row[name])
        if (y := row[f"y{x}"]) is not None and one["num_labels"] >= MIN_POINT
    ]
    if not points:
        return None
    by = f" relative to {reference}" if reference else ""
    names = [slice_name(one) for one in rows[0][name]]
    panels = panels_by("cache_size", points, "C = ", "x", "y", "high", "low")
    y = f"perplexity{by} (lower is better)"
    figure = draw(panels, x="last occurrence, tokens back", y=y, log_y=True, names=names)
    caption = f"Perplexity{by}, {SLICES[name].labels}, by distance to the last occurrence: "
    caption += f"{document['settings']['model']}; bars: 95 %, none below 200 labels"
    return figure, caption


def tables(document: Document, name: str) -> list[Table]:
    """Return for each cache size a table of the perplexities of the slices of that name, and with a
    reference one of ratios.
    """
    reference, model = document["settings"]["reference"], document["settings"]["model"]
    rows = [row for row in document["rows"] if row.get(name)]
    return [
        _table(f"{model}, C = {size}, {judged} by distance", group, name, judged, reference)
        for size, group in grouped(rows, "cache_size").items()
        for judged in (("perplexity", "ratio") if reference else ("perplexity",))
    ]


def _table(title: str, rows: list[Row], name: str, judged: str, reference: str | None) -> Table:
    columns = {
        f"y{i}": Column(
            f"{slice_name(one)} ({one['num_labels']})",
            2 if judged == "perplexity" else 3,
            "lower",
            "distance to the last occurrence, and labels",
            ends=None if reference and judged == "perplexity" else (f"low{i}", f"high{i}"),
            by_reference=True,
        )
        for i, one in enumerate(rows[0][name])
    }
    return table(title, [_wide(row, name, judged) for row in rows], columns, reference)


def _wide(row: Row, name: str, judged: str) -> Row:
    """Row with the figure of each slice, and the ends of its interval if there were enough labels,
    by the slice's number.
    """
    low, high = ("ratio_low", "ratio_high") if judged == "ratio" else ("low", "high")
    figures: Row = {}
    for i, one in enumerate(row[name]):
        figures[f"y{i}"] = one[judged]
        if one["high"] is not None:
            figures |= {f"low{i}": one[low], f"high{i}": one[high]}
    return row | figures
