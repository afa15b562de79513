"""Perplexity of streaming methods, with one protocol for all.

    ids     0 1 ... C | C+1 ...      | first_label ... first_label+num_tokens-1
            first input  fed, no labels  labels, one at a time

A smaller cache streams the text from its beginning, too.

A method scores a text step by step, or in a faster way with the same result: batches of windows if
it re-encodes clean ones, whole segments in the relative form if its realignment starts from the
original entries. So `seconds` does not measure a method's speed, unless every method steps
(`--stepwise`). `kvalign eval latency` measures speed best.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from kvalign.eval.protocol import DrawnSettings, Evaluation, ResultSettings, corpus_option
from kvalign.eval.protocol.data import Column, Document, Documents, Drawing, Row, Section, Table
from kvalign.eval.protocol.document import measures, summary_of
from kvalign.eval.protocol.tables import MIN_POINT, grouped, is_reference, table
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import option

if TYPE_CHECKING:
    from kvalign.methods.base import Method
    from kvalign.models.loading import LoadedModel


@dataclass(frozen=True, kw_only=True)
class PerplexitySettings(DrawnSettings):
    """Compare methods by perplexity on the same labels, at all cache sizes; lower is better. The
    labels begin after the first input of the largest cache, which is C + 1 tokens.

    Example:
        kvalign eval perplexity --methods kvalign,recompute --cache-sizes 32 --num-tokens 100
    """

    corpus: str = corpus_option("text to score")
    num_tokens: int = option(2000, help="labels to score", at_least=1)
    first_label: int | None = option(
        None,
        help="place of the first label in the text, counted from 0, for runs whose rows are "
        "compared (default: the largest C + 1 of this run)",
        at_least=1,
    )
    reference: str | None = option(
        None,
        help="method that ratios are relative to, with 95 % intervals; with several aligners or "
        "--num-sinks, the first",
    )
    keep: Path | None = option(
        None,
        help="folder that keeps the loss of each token (Parquet); losses in it are not "
        "computed again",
        writes="folder",
    )
    stepwise: bool = option(
        False, help="one step per token, even if a faster way gives the same results"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first_label is None:
            return
        if self.protocol == "paper":
            raise UserError("--first-label is for common labels: leave it out, or --protocol paper")
        if self.first_label < (least := max(self.cache_sizes) + 1):
            raise UserError(
                f"--first-label must be at least {least}, the first input of the largest cache, "
                f"got {self.first_label}"
            )

    def first_label_of(self, cache_size: int) -> int:
        if self.protocol == "paper":
            return cache_size + 1
        return self.first_label or max(self.cache_sizes) + 1


@measures(PerplexitySettings)
def perplexity(
    settings: PerplexitySettings, loaded: LoadedModel, methods: list[Method]
) -> Iterable[Row]:
    """Score every method at every cache size and number evicted.

    Returns:
        A document whose rows have the sizes, what `scores.of_losses` says of the losses, with a
        reference ratios of all this (ratio, ratio_low, ratio_high) and drift, and seconds (the
        labels' share of the time of the run, which also scores what comes before them).

    Raises:
        UserError: a corpus that ends before the last label.
    """
    from kvalign.eval.evaluations.perplexity.scores import (
        Distances,
        compare,
        distances,
        score_all,
        warn_of_guesses,
    )
    from kvalign.eval.protocol.grid import read_texts
    from kvalign.foundation.runs import keeping

    shape = (1, settings.first_label_of(max(settings.cache_sizes)) + settings.num_tokens)
    ids = read_texts(loaded, settings.corpus, shape, "--num-tokens or --cache-sizes")
    with keeping(lambda: summary_of(settings.keep)):
        text = ids[0].tolist()
        far = {x: Distances(distances(text, kind.length), kind.edges) for x, kind in SLICES.items()}
        rows, losses = score_all(methods, ids, settings, far)
    if settings.reference:
        compare(rows, losses, settings.reference, far)
    warn_of_guesses(rows, loaded.model.config.vocab_size, settings.corpus)
    return rows


LAST_BY_FIRST = "the last quarter of the labels relative to the first"
COLUMNS = {
    "num_labels": Column("labels"),
    "perplexity": Column(
        "perplexity",
        2,
        "lower",
        "exp of the mean loss of the labels; 95 %, moving-block bootstrap over them",
        ends=("low", "high"),
        by_reference=True,
    ),
    "ratio": Column(
        "ratio",
        3,
        "lower",
        "relative to the reference, on the same labels; 95 %, paired moving blocks",
        ends=("ratio_low", "ratio_high"),
        by_reference=True,
    ),
    "drift": Column("drift", 3, "", f"ratio in {LAST_BY_FIRST}"),
}
DRIFT = (
    "The same perplexity along the stream, in cache sizes since the cache filled. With a "
    "reference it is relative to the reference on the same labels, which removes the ups and "
    "downs of the text itself. A point is a stretch of the stream, as long as all before it. "
    f"The drift in the tables is the ratio in {LAST_BY_FIRST}. Errors that accumulate rise in "
    "both."
)


class SliceKind(NamedTuple):
    """Division of labels by how far back their last `length` tokens occurred before, the ends of
    slices, in cache sizes, and what a report says of it.
    """

    length: int
    edges: tuple[float, ...]
    title: str
    labels: str
    about: str


SLICES = {
    "bigrams": SliceKind(
        2,
        (0.25, 0.5, 0.75, 1.0, 2.0),
        "Recall slices",
        "labels that end a bigram",
        "Labels that end a bigram, by the distance to its last occurrence in the text, in "
        "cache sizes; and labels whose bigram is new (Arora et al. 2023). A method that still "
        "has that place can copy what followed it. Perplexity over all labels hides which "
        "method has forgotten it. Beyond C only a memory has it.",
    ),
    "tokens": SliceKind(
        1,
        (1.0, 4.0, 16.0),
        "Last said",
        "labels that occurred before",
        "Labels by the distance to the last occurrence of their own token, in cache sizes, and "
        "labels whose token is new. Beyond C only a memory still has the token, so this shows "
        "its benefit.",
    ),
}
"""Recall slices by their names in a row."""
TOTAL_TIME = "Every method steps token by token, as when it generates (the paper's figure 3)."
TIMED_COLUMNS = {
    "perplexity": COLUMNS["perplexity"],
    "seconds": Column("total s", 1, "lower", "time of the labels"),
}


class Perplexity(Evaluation):
    settings: ClassVar[type[ResultSettings]] = PerplexitySettings
    run = staticmethod(perplexity)
    heading = "Perplexity"
    about = (
        "exp(mean loss) over the same labels for every method and cache size; they begin after the "
        "first input of the largest cache, C + 1 tokens. In the paper's protocol each cache size "
        "has labels of its own, after its own first input. The 95 % interval comes from a block "
        "bootstrap. Only rows with equal sinks are judged; window has none."
    )
    over = "cache_size"
    columns = COLUMNS

    def select(self, documents: Documents) -> Documents:
        """Documents without those that only measure time, if another scored more of the text."""
        settings = {name: document["settings"] for name, document in documents.items()}
        of = {name: (s["model"], s["corpus"]) for name, s in settings.items()}
        scored = {of[name] for name, s in settings.items() if not s["stepwise"]}
        timed = {name for name, s in settings.items() if s["stepwise"] and of[name] in scored}
        return {name: document for name, document in documents.items() if name not in timed}

    def title(self, document: Document) -> str:
        num_labels = document["rows"][0]["num_labels"]
        return f"{super().title(document)}, {num_labels} labels of {document['settings']['corpus']}"

    def figure(self, document: Document) -> Drawing:
        """Perplexity (log scale) against cache size, a line with intervals for each method."""
        from kvalign.eval.drawing import draw, perplexities

        title, rows = self.title(document), document["rows"]
        panels = {f"{title}\n{_bars(document)}": perplexities(rows, "cache_size")}
        x, y = "cache size (entries)", "perplexity (lower is better)"
        caption = f"Perplexity against cache size: {title}; {_bars(document)}"
        if len({row.get("first_label") for row in rows}) > 1:
            caption += "; each cache size has labels of its own"
        return draw(panels, x=x, y=y, doubling_x=True, log_y=True), caption

    def sections(self, documents: Documents) -> list[Section]:
        selection = self.select(documents)
        stepped = {n: d for n, d in documents.items() if d["settings"]["stepwise"]}
        drift = Section.of(selection, "Drift", DRIFT, self._drift, suffix="-drift")
        title = "Total time"
        tables_of_times = partial(self.tables, columns=TIMED_COLUMNS)
        timed = Section.of(stepped, title, TOTAL_TIME, lambda document: None, tables_of_times)
        slices = [
            Section.of(
                selection,
                kind.title,
                kind.about,
                partial(slice_figure, name=name),
                partial(slice_tables, name=name),
                suffix=f"-{kind.title.lower().replace(' ', '-')}",
            )
            for name, kind in SLICES.items()
        ]
        return [*super().sections(selection), drift, *slices, timed]

    def _drift(self, document: Document) -> Drawing | None:
        from kvalign.eval.drawing import draw, panels_by

        settings = document["settings"]
        judged = "ratio" if settings["reference"] else "perplexity"
        points = [
            row | {"end": segment["end"], "y": segment[judged]}
            for row in document["rows"]
            if len(row["segments"]) > 1
            for segment in row["segments"]
            if (segment["end"] - segment.get("start", 0)) * row["cache_size"] >= MIN_POINT
        ]
        if not points:
            return None
        by = f" relative to {reference}" if (reference := settings["reference"]) else ""
        panels = panels_by("cache_size", points, "C = ", "end", "y")
        x, y = "cache sizes since the cache filled", f"perplexity{by}"
        figure = draw(panels, x=x, y=y, doubling_x=True, log_y=True)
        of = f"{settings['model']}, {settings['corpus']}"
        return figure, f"Perplexity{by} along the stream: {of}"


def _bars(document: Document) -> str:
    """Return what the whiskers of its perplexities are."""
    reference = document["settings"]["reference"]
    if any(row["high"] is None for row in document["rows"]):
        return "no bars: too few labels"
    of = f" of the ratio to {reference}" if reference else ""
    return f"bars: 95 % intervals{of}"


def slice_name(one: Row) -> str:
    """Return the name of a slice: the part of the cache, or of the text before it."""
    if one["from"] is None:
        return "new"
    return f"{one['from']:g}-{one['to']:g} C" if one["to"] else f"over {one['from']:g} C"


def _judged(document: Document, name: str) -> tuple[str, list[Row]]:
    """Figure that is said of slices, ratio, or without a reference perplexity; and the rows
    with this figure of each slice, y0, y1, ..., and low0, high0, ... where it has an interval.
    """
    is_ratio = document["settings"]["reference"] is not None
    judged, ends = ("ratio", "ratio_") if is_ratio else ("perplexity", "")
    rows = []
    for row in (row for row in document["rows"] if row.get(name)):
        slices = [*enumerate(row[name])]
        figures = {f"y{i}": one[judged] for i, one in slices}
        for end in ("low", "high"):
            figures |= {f"{end}{i}": x[ends + end] for i, x in slices if x["high"] is not None}
        rows.append(row | figures)
    return judged, rows


def slice_figure(document: Document, name: str) -> Drawing | None:
    """Ratio to the reference, or perplexity, by distance, of the slices of that name; None for a
    document without. A point without an interval has no bar.
    """
    from kvalign.eval.drawing import draw, panels_by

    reference, (_, rows) = document["settings"]["reference"], _judged(document, name)
    points = [
        row | {"x": x, "y": y, "low": row.get(f"low{x}", y), "high": row.get(f"high{x}", y)}
        for row in rows
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


def slice_tables(document: Document, name: str) -> list[Table]:
    """Table of the slices of that name for each cache size: ratios, or perplexities."""
    settings, (judged, rows) = document["settings"], _judged(document, name)
    tables = []
    for size, group in grouped(rows, "cache_size").items():
        columns = {
            f"y{i}": Column(
                f"{slice_name(one)} ({one['num_labels']})",
                3 if judged == "ratio" else 2,
                "lower",
                "distance to the last occurrence, and labels",
                ends=(f"low{i}", f"high{i}"),
                by_reference=True,
            )
            for i, one in enumerate(group[0][name])
        }
        title = f"{settings['model']}, C = {size}, {judged} by distance"
        tables.append(table(title, group, columns, settings["reference"]))
    return tables


EVALUATION = Perplexity()
