"""The first paragraph of a report: what was found, in sentences made of the numbers by the rules of
`kvalign.eval.protocol.verdicts`. Each says the figures that it rests on; where they do not tell, it
says that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from statistics import fmean
from typing import NamedTuple

from kvalign.eval.drawing.conclusions import recalled, sinks
from kvalign.eval.evaluations import EVALUATIONS
from kvalign.eval.protocol.aligner_names import identity_of, renamed
from kvalign.eval.protocol.evaluation import FLOOR, Document, Row
from kvalign.eval.protocol.tables import grouped, label_of
from kvalign.eval.protocol.verdicts import (
    MIN_LABELS,
    Verdict,
    apart,
    drifts,
    in_words,
    listed,
    readable_apart,
    spread,
    verdict,
)
from kvalign.eval.report.results_folder import Results

REPEATS = 0.5  # share of 4-grams that were there before, from which readable words say little
AS_GOOD, WORSE, FAILING = JUDGED = ("As good as", "Worse", "Failing")
BESIDE = "recompute"  # what is written is compared with what this writes


class Sentence(NamedTuple):
    """What it is on, and the figures."""

    lead: str
    text: str


@dataclass(frozen=True)
class Finding:
    """What was found of one model: in short, and by which figures."""

    model: str
    headline: str
    sentences: list[Sentence]

    @property
    def judges(self) -> bool:
        """Whether methods are judged by the rules that `MEANING` says."""
        return any(sentence.lead.startswith(JUDGED) for sentence in self.sentences)


def findings(results: Results) -> list[Finding]:
    """Those of each model that was measured; texts that no model wrote have none."""
    models = dict.fromkeys(d["settings"]["model"] for d in results.documents.values())
    found = [_of_model(results, model) for model in models if model]
    return [one for one in found if one.sentences]


def _of_model(results: Results, model: str) -> Finding:
    """As in the summary the first subject of each evaluation counts, and aligners are named beside
    all that were measured.
    """

    def of(name: str) -> list[Document]:
        chosen = EVALUATIONS[name].chosen(results.of(name)).values()
        return [document for document in chosen if document["settings"]["model"] == model]

    rows = [
        r for d in results.documents.values() if d["settings"]["model"] == model for r in d["rows"]
    ]
    names = {identity_of(row): row["aligner"] for row in renamed(rows)}

    def named(rows: Iterable[Row]) -> list[Row]:
        return [row | {"aligner": names[identity_of(row)]} for row in rows]

    headline, sentences, fit, reference = "", list[Sentence](), list[str](), None
    if documents := of("perplexity"):
        evaluation, settings = EVALUATIONS["perplexity"], documents[0]["settings"]
        title, reference = evaluation.title(documents[0]), settings["reference"]
        same = [
            document["rows"]
            for document in documents
            if evaluation.title(document) == title
            and document["settings"]["reference"] == reference
        ]
        rows = named(group[0] for group in grouped(chain(*same), identity_of).values())
        headline, sentences = quality(rows, reference, title.removeprefix(f"{model}, "))
        fit = _fit(rows, reference)
    for document in of("latency")[:1]:
        rows = named(EVALUATIONS["latency"].summary_rows(document))
        sentences += cost(rows, fit, reference)
    for name, what in (("readability", "Passages"), ("chat", "Answers in one conversation")):
        for document in of(name)[:1]:
            sentences += writing(named(EVALUATIONS[name].summary_rows(document)), what)
    for document in of("streameval")[:1]:
        sentences += answers(named(document["rows"]))
    for document in of("recall")[:1]:
        if said := recalled(named(document["rows"])):
            sentences.append(Sentence("Recall", f"{said[0].lower()}{said[1:]}"))
    for document in of("attention")[:1]:
        sentences.append(Sentence("Attention", sinks(named(document["rows"]))))
    return Finding(model, headline, sentences)


def quality(rows: Sequence[Row], reference: str | None, subject: str) -> tuple[str, list[Sentence]]:
    """Which methods are as good as the reference, which are not, and of which it cannot be told:
    in one sentence, and with the figures.
    """
    sizes = sorted({row["cache_size"] for row in rows})
    where = f"On {subject} at C = {', '.join(map(str, sizes))}"
    others = [row for row in rows if row["method"] != reference]
    if not reference or not others:
        return _alone(rows, where)
    by = {v: [row for row in others if verdict(row) is v] for v in Verdict}
    few = f"{others[0]['num_labels']} labels give no intervals, which take {MIN_LABELS}; "
    leads = {
        Verdict.GOOD: (f"{AS_GOOD} {reference}", ""),
        Verdict.WORSE: (WORSE, ""),
        Verdict.FAILS: (FAILING, ""),
        Verdict.OPEN: ("Too few labels to tell", ""),
        Verdict.UNKNOWN: (f"Too few labels to compare with {reference}", few),
    }
    sentences = [
        Sentence(lead, f"{rule}{_spans(by[v], sizes, with_interval=v is not Verdict.UNKNOWN)}.")
        for v, (lead, rule) in leads.items()
        if by[v]
    ]
    if growing := [row for row in others if drifts(row)]:
        rule = "drift is the ratio in the last quarter of the labels by that in the first: "
        sentences.append(Sentence("An error adds up", f"{rule}{_spans(growing, sizes, 'drift')}."))
    return _headline(others, reference, where), sentences


def _headline(others: Sequence[Row], reference: str, where: str) -> str:
    verdicts = {
        in_words(label): [*map(verdict, group)]
        for label, group in grouped(others, label_of).items()
    }
    if all({*found} == {Verdict.UNKNOWN} for found in verdicts.values()):
        return f"{where} there are too few labels to tell any method from {reference}."
    every = "" if len({row["cache_size"] for row in others}) == 1 else " at every C"
    good = [label for label, found in verdicts.items() if {*found} == {Verdict.GOOD}]
    fails = [label for label, found in verdicts.items() if Verdict.FAILS in found]
    verb = "is" if len(good) == 1 else "are"
    said = (
        f"{listed(good)} {verb} as good as {reference}{every}"
        if good
        else (f"no method is shown to be as good as {reference}{every}")
    )
    failing = f"; {listed(fails)} {'fails' if len(fails) == 1 else 'fail'}" if fails else ""
    return f"{where}, {said}{failing}."


def _fit(rows: Sequence[Row], reference: str | None) -> list[str]:
    """Methods that fail at no cache size."""
    bad = {Verdict.FAILS, Verdict.UNKNOWN}
    others = grouped([row for row in rows if row["method"] != reference], label_of)
    return [label for label, rows in others.items() if not bad & {*map(verdict, rows)}]


def _alone(rows: Sequence[Row], where: str) -> tuple[str, list[Sentence]]:
    """What can be said without a reference, or of nothing beside it."""
    label = in_words(label_of(rows[0]))
    if len(grouped(rows, label_of)) < 2:
        spans = spread((row["perplexity"] for row in rows), 1)
        return f"{where} {label} was measured alone.", [Sentence("Perplexity", f"{label} {spans}.")]
    said, column = [], EVALUATIONS["perplexity"].columns["perplexity"]
    for size, group in grouped(rows, "cache_size").items():
        low = min(group, key=itemgetter("perplexity"))
        ends = [span for row in group if (span := column.interval(row))]
        near = [span for span in ends if not apart(span, column.interval(low) or span)]
        tied = f", its interval overlaps {len(near) - 1} more" if len(near) > 1 else ""
        said.append(f"{in_words(label_of(low))} at C = {size} ({low['perplexity']:.1f}{tied})")
    headline = f"{where} there is no reference, so no ratios: --reference recompute gives them."
    return headline, [Sentence("Lowest perplexity", f"{'; '.join(said)}.")]


def _spans(
    rows: Iterable[Row], sizes: Sequence[int], name: str = "ratio", with_interval: bool = False
) -> str:
    """Methods with the smallest and largest of a figure, and the sizes if not all are meant."""
    spans = []
    for label, group in grouped(rows, label_of).items():
        own = sorted({row["cache_size"] for row in group})
        at = f" at C = {', '.join(map(str, own))}" if own != [*sizes] else ""
        figures = f"{name} {spread((row[name] for row in group), 3)}"
        if with_interval:
            low, high = min(r["ratio_low"] for r in group), max(r["ratio_high"] for r in group)
            figures += f" (95 %: {low:.3f} to {high:.3f})"
        spans.append(f"{in_words(label)}{at}, {figures}")
    return "; ".join(spans)


def cost(rows: Sequence[Row], fit: Sequence[str], reference: str | None) -> list[Sentence]:
    """What a step costs: of the methods that do not fail and the reference, or of all where it is
    not known which do.
    """
    rows = [row for row in rows if row["method"] != FLOOR and row.get("bare_mean_ratio")]
    by_label = grouped(rows, label_of)
    shown = {
        label: [row["bare_mean_ratio"] for row in group]
        for label, group in by_label.items()
        if not fit or label in fit or group[0]["method"] == reference
    }
    if not shown:
        return []
    ranked = sorted(shown.items(), key=lambda item: fmean(item[1]))
    spans = [f"{in_words(label)} {spread(ratios, 2)}" for label, ratios in ranked]
    what = "of those that do not fail" if fit and len(shown) < len(by_label) else "of all"
    rule = f"mean step {what}, times a bare step, which evicts nothing"
    return [Sentence("Cost", f"{rule}: {'; '.join(spans)}.")]


def writing(rows: Sequence[Row], what: str) -> list[Sentence]:
    """Whose words read worse than those of recompute, and who repeats himself."""
    said = []
    for size, group in grouped(rows, "cache_size").items():
        lead = f"{what}, C = {size}"
        judged = [row for row in group if row.get("readable_low") is not None]
        base = next((row for row in judged if row["method"] == BESIDE), None)
        others = [row for row in judged if row is not base]
        if base and others:
            said.append(Sentence(lead, _beside(base, others)))
        if loops := [row for row in group if row["repetition"] >= REPEATS]:
            spans = [
                f"{in_words(label_of(row))} ({100 * row['repetition']:.0f} %)" for row in loops
            ]
            text = f"most is there twice, so readable words say little: {'; '.join(spans)}."
            said.append(Sentence(f"Repetition, {lead[0].lower()}{lead[1:]}", text))
    return said


def _beside(base: Row, others: Sequence[Row]) -> str:
    def percent(row: Row) -> float:
        return 100 * row["readable"]

    told = [row for row in others if readable_apart(row, base)]
    own = f"{BESIDE}'s {percent(base):.0f} % of {base['num_chunks']} chunks, one draw"
    parts = []
    for word, sign in (("less", 1), ("more", -1)):
        some = [row for row in told if sign * (percent(base) - percent(row)) > 0]
        spans = [f"{in_words(label_of(row))} {percent(row):.0f} %" for row in some]
        parts += [f"{word} readable than {own}: {', '.join(spans)}"] if spans else []
    return (
        "; ".join(parts or [f"none is told from {own} ({spread(map(percent, others), 0)} %)"]) + "."
    )


def answers(rows: Sequence[Row]) -> list[Sentence]:
    """Whether StreamEval tells anything, and of whom."""
    if not any(row["accuracy"] for row in rows):
        return [Sentence("StreamEval", "tells nothing here: no answer is right with any method.")]
    shares = {
        label: fmean(row["accuracy"] for row in group)
        for label, group in grouped(rows, label_of).items()
    }
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    spans = [f"{in_words(label)} {100 * share:.0f} %" for label, share in ranked]
    return [Sentence("StreamEval", f"right answers over all distances: {'; '.join(spans)}.")]
