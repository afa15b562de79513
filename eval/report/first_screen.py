"""First screen of a report: for a model at most three sentences, three pictures, and a table of
verdicts with a row a method and a column a question.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvalign.eval.drawing.plots import Series, draw, series
from kvalign.eval.drawing.strips import draw_chunks
from kvalign.eval.evaluations import EVALUATIONS
from kvalign.eval.evaluations.readability import human_row
from kvalign.eval.protocol import conclusions
from kvalign.eval.protocol.aligner_names import identity_of, renamed
from kvalign.eval.protocol.conclusions import in_words, listed, spread
from kvalign.eval.protocol.evaluation import Column, Document, Plot, Row, Table
from kvalign.eval.protocol.tables import METHOD, grouped, label_of
from kvalign.eval.protocol.verdicts import (
    MIN_LABELS,
    MIN_POINT,
    Verdict,
    comparable,
    is_reference,
    verdict,
)
from kvalign.eval.report.results_folder import Results
from kvalign.foundation.console import Entry

READABLE = 0.95  # share of chunks from which words tell no methods apart
MOST_STRIPS = 7
SIZE = (4.6, 3.9)  # inches; three stand side by side
ORDER = [Verdict.FAILS, Verdict.WORSE, Verdict.OPEN, Verdict.UNKNOWN, Verdict.GOOD]
WORDS = {Verdict.OPEN: "too few labels to tell", Verdict.UNKNOWN: "too few labels"}


@dataclass(frozen=True)
class FirstScreen:
    """First part of a page on one model."""

    model: str
    sentences: list[str]
    pictures: list[Plot]
    verdicts: Table | None


def first_screens(results: Results) -> list[FirstScreen]:
    """First screen of each measured model; texts without a model have none."""
    models = dict.fromkeys(d["settings"]["model"] for d in results.documents.values())
    screens = [_Model(results, model).screen() for model in models if model]
    return [one for one in screens if one.sentences or one.pictures]


class _Model:
    """Documents of one model: of each evaluation the first subject; aligners are named beside all
    that were measured.
    """

    def __init__(self, results: Results, model: str):
        self.results, self.model = results, model
        documents = [d for d in results.documents.values() if d["settings"]["model"] == model]
        rows = renamed(row for document in documents for row in document["rows"])
        self.names = {identity_of(row): row["aligner"] for row in rows}
        self.reference, self.subject, self.scored = self._scored()

    def screen(self) -> FirstScreen:
        timed, written = self._of("latency"), self._of("readability")
        pictures = [self._ratios(), self._times(timed), self._strips(written)]
        sentences = [self._quality(), self._cost(timed), self._writing()]
        return FirstScreen(
            self.model,
            [one for one in sentences if one],
            [one for one in pictures if one],
            self._verdicts(timed),
        )

    def _of(self, name: str) -> Document | None:
        selection = EVALUATIONS[name].select(self.results.of(name)).values()
        return next((one for one in selection if one["settings"]["model"] == self.model), None)

    def _named(self, rows: Iterable[Row]) -> list[Row]:
        rows = [*rows]
        names = (self.names.get(identity_of(row), row["aligner"]) for row in rows)
        prefix = f"kvalign-{self.model}-"  # of older documents
        return [
            row | {"aligner": name and name.removeprefix(prefix)}
            for row, name in zip(rows, names, strict=True)
        ]

    def _summary(self, name: str) -> list[Row]:
        document = self._of(name)
        return self._named(EVALUATIONS[name].summary_rows(document)) if document else []

    def _scored(self) -> tuple[str | None, str, list[Row]]:
        """The reference, the labels, and the rows of perplexities on them, each once."""
        title_of = EVALUATIONS["perplexity"].title
        documents = EVALUATIONS["perplexity"].select(self.results.of("perplexity")).values()
        mine = [d for d in documents if d["settings"]["model"] == self.model]
        if not mine:
            return None, "", []
        subjects = [(title_of(one), one["settings"]["reference"]) for one in mine]
        title, reference = subjects[0]
        pairs = zip(mine, subjects, strict=True)
        rows = [row for one, subject in pairs if subject == subjects[0] for row in one["rows"]]
        once = [group[0] for group in grouped(rows, identity_of).values()]
        return reference, title.removeprefix(f"{self.model}, "), self._named(once)

    def _quality(self) -> str:
        """Return the comparison of methods with the reference."""
        rows, reference = self.scored, self.reference
        if not rows:
            return ""
        where = f"On {self.subject} at C = {', '.join(map(str, _sizes(rows)))}"
        if len(grouped(rows, in_words)) == 1:
            figures = spread((row["perplexity"] for row in rows), 1)
            return f"{where} {in_words(rows[0])} was measured alone: perplexity {figures}."
        if not reference:
            lowest = conclusions.lowest(rows)
            more = f" Lowest: {lowest}." if lowest else ""
            return f"{where} there is no reference, so no ratios: give --reference recompute.{more}"
        fair = comparable(rows, reference)
        if all(is_reference(row, reference) for row in fair):
            return f"{where} no method has as many sinks as {reference}."
        return f"{where}, {conclusions.compared(fair, reference)}."

    def _cost(self, timed: Document | None) -> str:
        """Return the time of a step of methods that do not fail; or that the machine was busy."""
        if not timed:
            return ""
        if ratio := conclusions.busy(timed["rows"]):
            return conclusions.BUSY.format(ratio)
        return conclusions.cost(self._summary("latency"), self._fit(), self.reference)

    def _fit(self) -> list[str]:
        """Methods that fail at no cache size; those with other sinks are not judged."""
        bad, fair = {Verdict.FAILS, Verdict.UNKNOWN}, comparable(self.scored, self.reference)
        failing = {in_words(row) for row in fair if verdict(row) in bad}
        rows = [row for row in fair if not is_reference(row, self.reference)]
        return [label for label in grouped(rows, in_words) if label not in failing]

    def _writing(self) -> str:
        """Return how readable the passages are; where all are, perplexity and repetition tell."""
        rows = self._summary("readability")
        if not rows:
            return ""
        if min(row["readable"] for row in rows) >= READABLE:
            ranked = sorted(rows, key=lambda row: row["repetition"])
            ends = [f"{100 * row['repetition']:.0f} % ({in_words(row)})" for row in ranked]
            span = " to ".join(dict.fromkeys([ends[0], ends[-1]]))
            return (
                f"All methods write readable words, so go by perplexity and repetition: {span} of "
                "4-grams were there before."
            )
        sentence = conclusions.beside(rows) or conclusions.readable(rows)
        return sentence[0].upper() + sentence[1:]

    def _ratios(self) -> Plot | None:
        """Perplexity by cache size, relative to the reference if there is one."""
        rows = [row for row in self.scored if row["num_labels"] >= MIN_POINT]
        rows = comparable(rows, self.reference) if self.reference else rows
        if not rows:
            return None
        if self.reference:
            whole = all(row["ratio_high"] is not None for row in rows)
            high, low = ("ratio_high", "ratio_low") if whole else (None, None)
            lines, y = series(rows, "cache_size", "ratio", high, low=low), "perplexity"
            y += f" relative to {self.reference}"
        else:
            lines, y = series(rows, "cache_size", "perplexity"), "perplexity"
        figure = draw(
            {"": lines}, x="cache size", y=y, doubling_x=True, log_y=_is_wide(lines), size=SIZE
        )
        title = y[0].upper() + y[1:]
        return Plot("first-perplexity", figure, f"{title}, by cache size; lower is better", title)

    def _times(self, timed: Document | None) -> Plot | None:
        """Mean time of a step by cache size."""
        if not timed:
            return None
        first = timed["rows"][0]["batch_size"]
        rows = self._named(row for row in timed["rows"] if row["batch_size"] == first)
        lines = series(rows, "cache_size", "mean_ms")
        figure = draw(
            {"": lines}, x="cache size", y="ms", doubling_x=True, log_y=_is_wide(lines), size=SIZE
        )
        caption, title = "Mean time of a step by cache size; lower is better", "Time of a step"
        if conclusions.busy(timed["rows"]):
            caption, title = f"{caption}. The machine was busy", f"{title} (busy machine)"
        return Plot("first-time", figure, caption, title)

    def _strips(self, written: Document | None) -> Plot | None:
        """Chunks of one passage of each method, and of a human's text, in order."""
        if not written:
            return None
        rows, first = written["rows"], written["rows"][0]
        same = ("cache_size", "prompt", "seed", "no_repeat_ngram_size")
        alike = [r for r in rows if all(r.get(x) == first.get(x) for x in same)]
        passages = self._named(alike)[:MOST_STRIPS]
        longest = max(len(row["chunks"]) for row in passages)
        if not longest:
            return None
        human = human_row(written)
        rows = [*passages, human] if human else passages
        cut = [row | {"chunks": row["chunks"][:longest]} for row in rows]
        figure = draw_chunks({"": cut}, width=SIZE[0], height=0.36)
        caption = f"Chunks of one passage each, C = {first['cache_size']}, in order"
        return Plot("first-readability", figure, caption, "Readability of what is written")

    def _verdicts(self, timed: Document | None) -> Table | None:
        """A row for each method with the sinks of the reference, a column for each question."""
        columns: list[tuple[Column, dict[str, str]]] = []
        labels: dict[str, None] = {}
        fair = comparable(self.scored, self.reference) if self.scored else []
        if fair:
            name = f"as good as {self.reference}?" if self.reference else "perplexity"
            groups = grouped(fair, label_of)
            texts = {label: self._judged(rows) for label, rows in groups.items()}
            columns.append((Column(name, None, about="ratio of the perplexities, all C"), texts))
            labels |= dict.fromkeys(groups)
        if timed and not conclusions.busy(timed["rows"]):
            rows = [r for r in self._summary("latency") if r.get("bare_mean_ratio")]
            about = "mean step relative to a bare step, which evicts nothing, all C"
            column = Column("time of a step", None, "lower", about)
            columns.append((column, _spans(rows, "bare_mean_ratio", 2)))
        for name, key, title, scale, better in QUESTIONS:
            rows = [row for row in self._summary(name) if row.get(key) is not None]
            # Where nothing is right with any method, an evaluation tells nothing.
            if rows and (name == "readability" or any(row[key] for row in rows)):
                texts = _spans(rows, key, 0 if scale == 100 else 2, scale)
                columns.append((Column(title, None, better), texts))  # type: ignore[arg-type]
        for _, texts in columns if not labels else []:
            labels |= dict.fromkeys(texts)
        if len(labels) < 2 or not columns:
            return None
        lines = [
            [Entry(label), *(Entry(texts.get(label, "-")) for _, texts in columns)]
            for label in labels
        ]
        others = dict.fromkeys(label_of(r) for r in self.scored if label_of(r) not in labels)
        note = f"Other sinks, so not compared: {listed([*others])}." if others else ""
        title = f"{self.model}: verdicts" + f", sinks as {self.reference}" * bool(self.reference)
        return Table(title, [METHOD, *(column for column, _ in columns)], lines, note)

    def _judged(self, rows: Sequence[Row]) -> str:
        """Verdict on a method at all its cache sizes, and its ratios."""
        if not self.reference:
            return spread((row["perplexity"] for row in rows), 1)
        if is_reference(rows[0], self.reference):
            return "reference"
        ratios = spread((row["ratio"] for row in rows), 2)
        worst = min(map(verdict, rows), key=ORDER.index)
        at = [row["cache_size"] for row in rows if verdict(row) is worst]
        where = f" at C = {', '.join(map(str, at))}" if len(at) < len(rows) else ""
        return f"{WORDS.get(worst, worst.value)}{where}: {ratios}"


QUESTIONS = [
    ("readability", "readable", "readable, %", 100, "higher"),
    ("readability", "repetition", "repeats, %", 100, "lower"),
    ("recall", "oldest", "recall, oldest quarter", 1, "higher"),
    ("told", "accuracy", "told facts", 1, "higher"),
    ("streameval", "accuracy", "StreamEval", 1, "higher"),
]
MEANS = (
    f"Only rows with equal sinks are compared, and {MIN_LABELS} labels or more. Figures are ratios "
    "or shares, from the smallest to the largest of all cache sizes."
)


def _spans(rows: Iterable[Row], key: str, digits: int, scale: float = 1) -> dict[str, str]:
    return {
        label: spread((scale * row[key] for row in group), digits)
        for label, group in grouped(rows, label_of).items()
    }


def _sizes(rows: Iterable[Row]) -> list[int]:
    return sorted({row["cache_size"] for row in rows})


def _is_wide(lines: Sequence[Series]) -> bool:
    values = [value for line in lines for value in line.y]
    return max(values) > 2 * min(values)
