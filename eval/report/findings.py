"""First paragraph of a report: the findings, in sentences with their figures."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from kvalign.eval.evaluations import EVALUATIONS
from kvalign.eval.protocol import conclusions
from kvalign.eval.protocol.aligner_names import identity_of, renamed
from kvalign.eval.protocol.conclusions import UNEQUAL, in_words, spans_at, spread
from kvalign.eval.protocol.evaluation import Document, Row
from kvalign.eval.protocol.tables import grouped
from kvalign.eval.protocol.verdicts import (
    MIN_LABELS,
    Verdict,
    comparable,
    drifts,
    is_reference,
    verdict,
)
from kvalign.eval.report.results_folder import Results

REPEATS = 0.5  # share of 4-grams that were there before, from which readable words say little
AS_GOOD, WORSE, FAILING = JUDGED = ("As good as", "Worse", "Failing")


class Sentence(NamedTuple):
    """A sentence: its subject, and the figures."""

    lead: str
    text: str


@dataclass(frozen=True)
class Finding:
    """Finding on one model: in short, and its figures."""

    model: str
    headline: str
    sentences: list[Sentence]

    @property
    def judges(self) -> bool:
        """Return whether methods are judged by the rules of `MEANING`."""
        return any(sentence.lead.startswith(JUDGED) for sentence in self.sentences)


def findings(results: Results) -> list[Finding]:
    """Findings on each measured model; texts without a model have none."""
    models = dict.fromkeys(d["settings"]["model"] for d in results.documents.values())
    of_models = [_of_model(results, model) for model in models if model]
    return [one for one in of_models if one.sentences]


def _of_model(results: Results, model: str) -> Finding:
    """Return the rows of the first subject of each evaluation; aligners are named beside all that
    were measured.
    """

    def of(name: str) -> list[Document]:
        selection = EVALUATIONS[name].select(results.of(name)).values()
        return [document for document in selection if document["settings"]["model"] == model]

    rows = [
        r for d in results.documents.values() if d["settings"]["model"] == model for r in d["rows"]
    ]
    names = {identity_of(row): row["aligner"] for row in renamed(rows)}

    def named(rows: Iterable[Row]) -> list[Row]:
        return [row | {"aligner": names[identity_of(row)]} for row in rows]

    headline, sentences, fit, reference = "", list[Sentence](), list[str](), None
    if documents := of("perplexity"):
        title_of = EVALUATIONS["perplexity"].title
        subjects = [(title_of(one), one["settings"]["reference"]) for one in documents]
        title, reference = subjects[0]
        pairs = zip(documents, subjects, strict=True)
        same = chain.from_iterable(one["rows"] for one, subject in pairs if subject == subjects[0])
        rows = named(group[0] for group in grouped(same, identity_of).values())
        headline, sentences = quality(rows, reference, title.removeprefix(f"{model}, "))
        fit = _fit(rows, reference)
    for document in of("latency")[:1]:
        rows = named(EVALUATIONS["latency"].summary_rows(document))
        sentences += _of("Cost", conclusions.cost(rows, fit, reference))
    for name, what in (("readability", "Passages"), ("chat", "Answers in one conversation")):
        for document in of(name)[:1]:
            sentences += writing(named(EVALUATIONS[name].summary_rows(document)), what)
    chief = {"streameval": conclusions.answers, "recall": conclusions.recalled}
    for name, conclusion in (chief | {"attention": conclusions.sinks}).items():
        for document in of(name)[:1]:
            sentences += _of(EVALUATIONS[name].heading, conclusion(named(document["rows"])))
    return Finding(model, headline, sentences)


def _of(lead: str, text: str) -> list[Sentence]:
    """A conclusion after what it is on; none where it says nothing."""
    return [Sentence(lead, text[0].lower() + text[1:])] if text else []


def quality(rows: Sequence[Row], reference: str | None, subject: str) -> tuple[str, list[Sentence]]:
    """Return the comparison of methods with the reference, in one sentence and in figures."""
    sizes = sorted({row["cache_size"] for row in rows})
    where = f"On {subject} at C = {', '.join(map(str, sizes))}"
    if not reference or all(is_reference(row, reference) for row in rows):
        return _alone(rows, where)
    fair = comparable(rows, reference)
    others = [row for row in fair if not is_reference(row, reference)]
    unequal = [*grouped([row for row in rows if row not in fair], in_words)]
    not_judged = [Sentence(f"Other sinks than {reference}", f"{', '.join(unequal)}: not judged.")]
    if not others:
        return f"{where} no method has as many sinks as {reference}.", not_judged
    by = {v: [row for row in others if verdict(row) is v] for v in Verdict}
    few = f"{others[0]['num_labels']} labels give no intervals, which need {MIN_LABELS}; "
    leads = {
        Verdict.GOOD: (f"{AS_GOOD} {reference}", ""),
        Verdict.WORSE: (WORSE, ""),
        Verdict.FAILS: (FAILING, ""),
        Verdict.OPEN: ("Too few labels to tell", ""),
        Verdict.UNKNOWN: (f"Too few labels to compare with {reference}", few),
    }
    sentences = [
        Sentence(lead, f"{rule}{spans_at(by[v], sizes, with_interval=v is not Verdict.UNKNOWN)}.")
        for v, (lead, rule) in leads.items()
        if by[v]
    ]
    if growing := [row for row in others if drifts(row)]:
        rule = "drift is the ratio in the last quarter of the labels relative to the first: "
        sentences += [Sentence("Errors accumulate", f"{rule}{spans_at(growing, sizes, 'drift')}.")]
    sentences += not_judged if unequal else []
    return f"{where}, {conclusions.compared(others, reference)}.", sentences


def _fit(rows: Sequence[Row], reference: str | None) -> list[str]:
    """Methods that fail at no cache size; those with other sinks are not judged."""
    bad, fair = {Verdict.FAILS, Verdict.UNKNOWN}, comparable(rows, reference)
    failing = {in_words(row) for row in fair if verdict(row) in bad}
    others = grouped([row for row in rows if not is_reference(row, reference)], in_words)
    return [label for label in others if label not in failing]


def _alone(rows: Sequence[Row], where: str) -> tuple[str, list[Sentence]]:
    """Return what can be said without a reference, or of nothing beside it."""
    label = in_words(rows[0])
    if len(grouped(rows, in_words)) < 2:
        figures = spread((row["perplexity"] for row in rows), 1)
        alone = Sentence("Perplexity", f"{label} {figures}.")
        return f"{where} {label} was measured alone.", [alone]
    headline = f"{where} there is no reference, so no ratios: give --reference recompute."
    lowest = conclusions.lowest(rows)
    return headline, [Sentence("Lowest perplexity", f"{lowest}." if lowest else UNEQUAL)]


def writing(rows: Sequence[Row], what: str) -> list[Sentence]:
    """Methods less readable than recompute, and methods that repeat themselves."""
    sentences = []
    for size, group in grouped(rows, "cache_size").items():
        sentences += _of(f"{what}, C = {size}", conclusions.beside(group))
        loops = [row for row in group if row["repetition"] >= REPEATS]
        shares = [f"{in_words(row)} ({100 * row['repetition']:.0f} %)" for row in loops]
        text = f"most repeats, so readable words say little: {'; '.join(shares)}."
        lead = f"Repetition, {what[0].lower()}{what[1:]}, C = {size}"
        sentences += [Sentence(lead, text)] if loops else []
    return sentences
