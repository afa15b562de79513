"""Contents of a report on a folder of results: the sections, and for each model a first screen with
what was measured, three pictures, and a table of verdicts (a row a method, a column a question).
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from kvalign.eval.drawing import Series, draw, draw_bars, draw_chunks, draw_frontier, series
from kvalign.eval.evaluations import EVALUATIONS
from kvalign.eval.judging import MEASURES
from kvalign.eval.protocol.data import FLOOR, Column, Document, Panel, Plot, Row, Section, Table
from kvalign.eval.protocol.tables import (
    MEANING,
    METHOD,
    MIN_POINT,
    SLOW,
    RatioVerdict,
    comparable,
    grouped,
    identity_of,
    is_reference,
    label_of,
    means,
    renamed,
    sinks_in,
    verdict,
)
from kvalign.eval.report import Results
from kvalign.foundation.console import Entry
from kvalign.foundation.statistics import MIN_LABELS, apart


def sections(results: Results) -> list[Section]:
    """Sections with content, of the evaluations in their order."""
    parts = [s for name, e in EVALUATIONS.items() for s in e.sections(results.of(name))]
    return [section for section in parts if section.plots or section.tables]


def panels(results: Results) -> list[Panel]:
    return [
        panel
        for name, evaluation in EVALUATIONS.items()
        for document in results.of(name).values()
        for panel in evaluation.panels(document)
    ]


MOST_STRIPS = 7
SIZE = (4.6, 3.9)  # inches; three stand side by side
BESIDE = "recompute"  # what is written is compared with what this writes


class FirstScreen:
    """First part of a page on one model, from the first subject of each evaluation. Aligners are
    named beside all that were measured.
    """

    def __init__(self, results: Results, model: str):
        self.results, self.model = results, model
        documents = [d for d in results.documents.values() if d["settings"]["model"] == model]
        rows = renamed(row for document in documents for row in document["rows"])
        self.names = {identity_of(row): row["aligner"] for row in rows}
        self.reference, self.subject, self.scored = self._scored()
        self.timed, self.written = self._of("latency"), self._of("readability")
        self.busy = EVALUATIONS["latency"].doubt(self.timed) if self.timed else ""
        self.weighed = self._of("frontier")
        if self.weighed and (self.busy or not self.timed):
            self.timed, self.busy = self.weighed, ""
        digest = hashlib.sha256(model.encode()).hexdigest()[:8]  # names are unique on a page
        self.pictures = [
            one._replace(name=f"{one.name}-{digest}")
            for one in (self._ratios(), self._times(), self._recall() or self._strips())
            if one
        ]
        self.about = " ".join(filter(None, (self._about(), self.busy)))
        self.verdicts = self._verdicts()
        self.take = self._take()

    def _all_of(self, name: str) -> list[Document]:
        selection = EVALUATIONS[name].select(self.results.of(name)).values()
        return [one for one in selection if one["settings"]["model"] == self.model]

    def _of(self, name: str) -> Document | None:
        return next(iter(self._all_of(name)), None)

    def _named(self, rows: Iterable[Row]) -> list[Row]:
        return [row | {"aligner": self.names.get(identity_of(row), row["aligner"])} for row in rows]

    def _means(self, name: str, key: str) -> list[Row]:
        """Means of a figure of an evaluation for each method and its sizes."""
        document = self._of(name)
        return self._named(means(document["rows"], [key])) if document else []

    def _scored(self) -> tuple[str | None, str, list[Row]]:
        """The reference, the labels, and the rows of perplexities on them, each once."""
        mine = self._all_of("perplexity") or self._all_of("frontier")
        if not mine:
            return None, "", []

        def subject(one: Document) -> tuple[str | None, str]:
            title = EVALUATIONS["perplexity"].title(one)
            return one["settings"].get("reference"), title.removeprefix(f"{self.model}, ")

        same = [one for one in mine if subject(one) == subject(mine[0])]
        rows = [_by_reference(row) for one in same for row in one["rows"]]
        once = [group[0] for group in grouped(rows, identity_of).values()]
        return *subject(mine[0]), self._named(once)

    def _about(self) -> str:
        """Return on what the methods were scored, and relative to what."""
        if facts := self._of("recall"):
            size = max(row["cache_size"] for row in facts["rows"])
            return f"Questions about facts anywhere in a cache of {size}; 0.125 is chance."
        if not self.scored:
            return ""
        sizes = sorted({row["cache_size"] for row in self.scored})
        none = ". Without a reference there are no ratios: give --reference recompute."
        to = f", relative to {self.reference}." if self.reference else none
        return f"{self.subject} at C = {', '.join(map(str, sizes))}{to}"

    def _ratios(self) -> Plot | None:
        """Perplexity against time, or by cache size, relative to the reference if there is one."""
        if self.weighed:
            size = max(row["cache_size"] for row in self.weighed["rows"])
            rows = self._named(r for r in self.weighed["rows"] if r["cache_size"] == size)
            caption = f"Perplexity against the mean time of a token at C = {size}; rings: no other "
            caption += "beats these in both; bars: 95 %"
            figure = draw_frontier({"": rows}, size=SIZE)
            return Plot("first-frontier", figure, caption, "Perplexity against time")
        rows = [row for row in self.scored if row["num_labels"] >= MIN_POINT]
        rows = comparable(rows, self.reference) if self.reference else rows
        if not rows:
            return None
        judged, title = "perplexity", "Perplexity"
        if self.reference:
            judged, title = "ratio", f"Perplexity relative to {self.reference}"
        whole = self.reference and all(row["ratio_high"] is not None for row in rows)
        high, low = ("ratio_high", "ratio_low") if whole else (None, None)
        lines, y = series(rows, "cache_size", judged, high, low=low), f"p{title[1:]}"
        caption = f"{title}, by cache size; lower is better"
        return _by_size("first-perplexity", lines, y, caption, title)

    def _timed_rows(self) -> list[Row]:
        """Rows of the first batch size."""
        rows = self.timed["rows"] if self.timed else []
        first = rows[0].get("batch_size") if rows else None
        return self._named(
            r for r in rows if r.get("batch_size") == first and r["mean_ms"] is not None
        )

    def _times(self) -> Plot | None:
        """Slowest step of each method, or mean time of a step by cache size."""
        if not self.timed:
            return None
        if self.timed is self.weighed:
            size = max(row["cache_size"] for row in self.weighed["rows"])
            rows = [r for r in self._timed_rows() if r["cache_size"] == size and "slowest_ms" in r]
            if not rows:
                return None
            about = f"The slowest step of a turn at C = {size}, the median over turns, and as a "
            about += "mark the mean step; lower is better"
            figure = draw_bars(rows, "slowest_ms", "ms", mark="mean_ms", size=SIZE)
            return Plot("first-slowest", figure, about, "The slowest token")
        lines = series(self._timed_rows(), "cache_size", "mean_ms")
        title = "Time of a step" + " (busy machine)" * bool(self.busy)
        caption = f"Mean time of a step by cache size; lower is better. {self.busy}".rstrip(". ")
        return _by_size("first-time", lines, "ms", caption, title)

    def _recall(self) -> Plot | None:
        """Right answers by the distance of the fact."""
        document = self._of("recall")
        all_rows = document["rows"] if document else []
        size = max((row["cache_size"] for row in all_rows), default=0)
        rows = self._named(row for row in all_rows if row["cache_size"] == size)
        if not rows:
            return None
        figure = draw_bars(rows, "accuracy", "share of right answers", size=SIZE)
        caption = f"Facts anywhere in a cache of {size} that are recalled; 0.125 by chance"
        return Plot("first-recall", figure, caption, "Facts recalled")

    def _strips(self) -> Plot | None:
        """Chunks of one passage of each method, and of a human's text, in order."""
        if not self.written:
            return None
        rows, first = self.written["rows"], self.written["rows"][0]
        same = ("cache_size", "prompt", "seed", "no_repeat_ngram_size")
        alike = [r for r in rows if all(r.get(x) == first.get(x) for x in same)]
        passages = self._named(alike)[:MOST_STRIPS]
        # As long as the shortest: a longer bar looks like a score.
        shortest = min((len(row["chunks"]) for row in passages if row["chunks"]), default=0)
        if not shortest:
            return None
        human = EVALUATIONS["readability"].yardstick(self.written)
        rows = [*passages, human] if human else passages
        cut = [row | {"chunks": row["chunks"][:shortest]} for row in rows]
        figure = draw_chunks({"": cut}, width=SIZE[0], height=0.36)
        where = f"of one passage each, C = {first['cache_size']}, in order"
        caption = f"The first {shortest} chunks {where}: an example, no score"
        return Plot("first-readability", figure, caption, "An example of what is written")

    def _verdicts(self) -> Table | None:
        """A row for each method with the sinks of the reference, a column for each question."""
        columns: list[tuple[Column, dict[str, str]]] = []
        fair = comparable(self.scored, self.reference) if self.scored else []
        labels = [*grouped(fair, label_of)]
        if fair:
            name = f"as good as {self.reference}?" if self.reference else "perplexity"
            column = Column(name, None, about="ratio of the perplexities, all C")
            columns.append((column, _by_label(fair, self._judged)))
        if self.timed and not self.busy:
            rows = [row for row in self._timed_rows() if row["method"] != FLOOR]
            for key, (title, about) in TIMES.items():
                if all(key in row for row in rows):
                    columns.append((Column(title, None, "lower", about), _spans(rows, key, 1)))
        if self.written:
            rows = EVALUATIONS["readability"].rows(self.written)
            same = "no_repeat_ngram_size"
            rows = self._named(row for row in rows if row[same] == rows[0][same])
            about = f"less, more: than {BESIDE}'s, by their 95 % intervals"
            texts = _by_label(rows, lambda group: _readable(group, rows))
            columns.append((Column("readable, %", None, "higher", about), texts))
            texts = _spans(rows, "repetition", 0, 100)
            columns.append((Column("repeats, %", None, "lower"), texts))
        for name, (key, title) in SHARES.items():
            rows = self._means(name, key)
            # Where nothing is right with any method, an evaluation tells nothing.
            if any(row[key] for row in rows):
                columns.append((Column(title, None, "higher"), _spans(rows, key, 2)))
        labels = labels or [*dict.fromkeys(label for _, texts in columns for label in texts)]
        if len(labels) < 2 or not columns:
            return None
        lines = [
            [Entry(label), *(Entry(texts.get(label, "")) for _, texts in columns)]
            for label in labels
        ]
        others = dict.fromkeys(label_of(r) for r in self.scored if label_of(r) not in labels)
        notes = [MEANING] * bool(self.reference)
        notes += [f"Other sinks, so not compared: {', '.join(others)}."] * bool(others)
        note = " ".join(notes)
        title = f"{self.model}: verdicts" + f", sinks as {self.reference}" * bool(self.reference)
        return Table(title, [METHOD, *(column for column, _ in columns)], lines, note)

    def _judged(self, rows: Sequence[Row]) -> str:
        """Verdict on a method at all its cache sizes, and its ratios."""
        if not self.reference:
            return _spread((row["perplexity"] for row in rows), 1)
        if is_reference(rows[0], self.reference):
            return "reference"
        ratios = _spread((row["ratio"] for row in rows), 3)
        worst = min(map(verdict, rows), key=ORDER.index)
        at = [row["cache_size"] for row in rows if verdict(row) is worst]
        where = f" at C = {', '.join(map(str, at))}" if len(at) < len(rows) else ""
        return f"{worst}{where}: {ratios}"

    def _take(self) -> str:
        """The method to take and why, by the rule that `MEANS` says; empty without a choice."""
        fair = comparable(self.scored, self.reference) if self.reference else []
        groups = grouped((row for row in fair if row["method"] not in SLOW), label_of)

        def judged(row: Row) -> RatioVerdict:
            return RatioVerdict.GOOD if is_reference(row, self.reference) else verdict(row)

        if len(groups) < 2 or any(judged(row) is RatioVerdict.UNKNOWN for row in fair):
            return ""
        worst = {x: min(ORDER.index(judged(row)) for row in rows) for x, rows in groups.items()}
        mean = {x: fmean(row["ratio"] or 1.0 for row in rows) for x, rows in groups.items()}
        rows_of_time = [] if self.busy else self._timed_rows()
        ms, slowest = (
            {
                x: fmean(row.get(name, 0.0) for row in rows)
                for x, rows in grouped(rows_of_time, label_of).items()
            }
            for name in ("mean_ms", "slowest_ms")
        )
        left = [x for x in groups if worst[x] == max(worst.values())]
        left = near = _as_good(left, groups, mean)
        if timed := {x: ms[x] for x in near if x in ms}:
            left = [x for x in timed if ms[x] <= AS_FAST * min(timed.values())]
            least = min(slowest[x] for x in left)
            left = [x for x in left if slowest[x] <= AS_EVEN * least]
        best = min(left, key=mean.__getitem__)
        ratios = _spread((row["ratio"] or 1.0 for row in groups[best]), 3)
        why = f"{ratios} times {self.reference}'s perplexity"
        base = next((label_of(r) for r in fair if is_reference(r, self.reference)), "")
        if {best, base} <= ms.keys() and best != base:
            why += f" in {ms[best] / ms[base]:.2f} of its time"
        rows, texts = groups[best], [f"Take {best}: {why}."]
        for label in (x for x in near if x != best):
            price = ""
            if {label, best} <= ms.keys():
                if ms[label] > AS_FAST * ms[best]:
                    price = f", but takes {ms[label] / ms[best]:.2f} times as long"
                elif slowest[label] > AS_EVEN * slowest[best]:
                    price = f", but its slowest token takes {slowest[label]:.1f} ms, "
                    price += f"{best}'s {slowest[best]:.1f}"
            texts.append(f"{label} is as good here{price}.")
        texts = [text.replace(sinks_in(rows[0]), "") for text in texts]  # all have as many
        return " ".join([*texts, *self._against_auto(rows)])

    def _against_auto(self, rows: Sequence[Row]) -> list[str]:
        """Sentences where `auto` takes another method than these rows', and on what weighs more."""
        document = (self._all_of("perplexity") or self._all_of("frontier"))[0]
        num, texts = rows[0]["num_labels"], []
        for one in document.get("auto", ()):
            if one["method"] == rows[0]["method"]:
                continue
            text = f"`auto` takes {one['method']} at C = {one['cache_size']}: {one['why']}."
            if judged := one["num_labels"]:
                weights = {f"the {judged} labels on which its aligner was judged": judged}
                weights[f"the {num} labels of this report"] = num
                heavy, light = sorted(weights, key=weights.__getitem__, reverse=True)
                text += f" {heavy[0].upper()}{heavy[1:]} weigh more than {light}."
            texts.append(text)
        return texts


def first_screens(results: Results) -> list[FirstScreen]:
    """First screen of each measured model; texts without a model have none."""
    models = dict.fromkeys(d["settings"]["model"] for d in results.documents.values())
    screens = [FirstScreen(results, model) for model in models if model]
    return [one for one in screens if one.about or one.pictures or one.verdicts]


SHARES = {
    "recall": ("accuracy", "facts recalled"),
    "told": ("accuracy", "told facts"),
    "streameval": ("accuracy", "StreamEval"),
}
TIMES = {
    "mean_ms": ("ms a token", "mean step, all C"),
    "slowest_ms": ("slowest, ms", "the slowest step of a turn, the median over turns, all C"),
}
ORDER = [*RatioVerdict]  # the worst comes first
AS_FAST, AS_EVEN = 1.05, 1.5
MEANS = (
    "The method to take is one of those with the best verdict at their worst cache size. Of these "
    "it is one whose interval overlaps that of the lowest mean ratio at each cache size; of these "
    f"one whose token takes at most {AS_FAST:g} times the shortest time; of these one whose "
    f"slowest token takes at most {AS_EVEN:g} times that of the best; and of these the one of the "
    f"lowest mean ratio. {' and '.join(SLOW)} are no candidates. Only rows with equal sinks are "
    "compared, and "
    f"{MIN_LABELS} labels or more. Figures are ratios or shares, from the smallest to the largest "
    "of all cache sizes."
)


def _as_good(
    labels: Sequence[str], groups: Mapping[str, Sequence[Row]], mean: Mapping[str, float]
) -> list[str]:
    """Labels whose interval at each cache size overlaps that of the one with the lowest mean."""

    def spans(label: str) -> dict[int, tuple[float, float]]:
        rows = [row for row in groups[label] if row.get("ratio_high") is not None]
        return {row["cache_size"]: (row["ratio_low"], row["ratio_high"]) for row in rows}

    lowest = spans(min(labels, key=mean.__getitem__))
    return [
        label
        for label in labels
        if not any(apart(span, lowest.get(size, span)) for size, span in spans(label).items())
    ]


def _by_reference(row: Row) -> Row:
    """A row whose `ratio` is to the reference, as in `eval perplexity`; of `eval frontier`, too."""
    ends = ("", "_low", "_high")
    if "frontier" not in row:
        return row
    return row | {f"ratio{end}": row.get(f"by_reference{end}") for end in ends}


def _spread(values: Iterable[float], digits: int) -> str:
    """The smallest and the largest of figures, or the one that all equal."""
    texts = dict.fromkeys(f"{value:.{digits}f}" for value in sorted(values))
    return " to ".join([*texts][:: max(1, len(texts) - 1)])


def _by_label(rows: Iterable[Row], text: Callable[[list[Row]], str]) -> dict[str, str]:
    return {label: text(group) for label, group in grouped(rows, label_of).items()}


def _spans(rows: Iterable[Row], key: str, digits: int, scale: float = 1) -> dict[str, str]:
    return _by_label(rows, lambda group: _spread((scale * row[key] for row in group), digits))


def _readable(rows: list[Row], of_all: Sequence[Row]) -> str:
    """Readable chunks of a method in %, and whether they are less or more than `BESIDE`'s with as
    many sinks.
    """
    fair = comparable(of_all, BESIDE)
    bases = {row["cache_size"]: row for row in fair if row["method"] == BESIDE}
    ends, words = MEASURES["readable"].interval, set()
    for row in rows:
        span, base = ends(row), ends(bases.get(row["cache_size"], {}))
        word = ""
        if row in fair and span and base and apart(span, base):
            word = "less: " if span < base else "more: "
        words.add(word)
    text = _spread((100 * row["readable"] for row in rows), 0)
    return words.pop() + text if len(words) == 1 else text


def _by_size(name: str, lines: Sequence[Series], y: str, caption: str, heading: str) -> Plot:
    values = [value for line in lines for value in line.y]
    is_wide = max(values) > 2 * min(values)
    figure = draw({"": [*lines]}, x="cache size", y=y, doubling_x=True, log_y=is_wide, size=SIZE)
    return Plot(name, figure, caption, heading)
