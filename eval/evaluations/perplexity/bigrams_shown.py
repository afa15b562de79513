"""Recall slices in the report: a table and a plot of each by distance (`bigrams.py`)."""

from kvalign.eval.drawing.plots import draw, panels_by
from kvalign.eval.protocol.conclusions import recall
from kvalign.eval.protocol.evaluation import Column, Document, Drawing, Row, Table
from kvalign.eval.protocol.tables import grouped, table

NEW = "new"  # bigrams that were not there before


def slice_name(one: Row) -> str:
    """What a slice is called: the part of the cache, or of the text before it."""
    if one["from"] is None:
        return NEW
    return f"{one['from']:g}-{one['to']:g} C" if one["to"] else f"over {one['from']:g} C"


def figure(document: Document) -> Drawing | None:
    """The ratio to the reference, or the perplexity, by distance; None of a document without."""
    reference = document["settings"]["reference"]
    rows = [row for row in document["rows"] if row.get("bigrams")]
    points = [
        row | {"x": x} | one
        for row in rows
        if row["method"] != reference
        for x, one in enumerate(_figures(row, "ratio" if reference else "perplexity"))
        if one["y"] is not None
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
    return [
        _table(f"{model}, C = {size}, {judged} by distance", group, judged, reference)
        for size, group in grouped(rows, "cache_size").items()
        for judged in (("perplexity", "ratio") if reference else ("perplexity",))
    ]


def _table(title: str, rows: list[Row], judged: str, reference: str | None) -> Table:
    columns = {
        f"y{i}": Column(
            f"{slice_name(one)} ({one['num_labels']})",
            2 if judged == "perplexity" else 3,
            "lower",
            "distance of the bigram's last occurrence, and labels",
            ends=None if reference and judged == "perplexity" else (f"low{i}", f"high{i}"),
            by_reference=True,
        )
        for i, one in enumerate(rows[0]["bigrams"])
    }
    lines = [
        row | {f"{name}{i}": one[name] for i, one in enumerate(figures) for name in one}
        for row in rows
        for figures in [_figures(row, judged)]
    ]
    return table(title, lines, columns, reference)


def _figures(row: Row, judged: str) -> list[Row]:
    """Of each slice the figure, `y`, and the ends of its interval, `low` and `high`: the figure
    itself where labels were too few.
    """
    low, high = ("ratio_low", "ratio_high") if judged == "ratio" else ("low", "high")
    own = {"y": judged, "low": judged, "high": judged}
    names = {"y": judged, "low": low, "high": high}
    return [
        {end: one[name] for end, name in (own if one[high] is None else names).items()}
        for one in row["bigrams"]
    ]
