"""The sections of the report: each evaluation's figures and tables."""

from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from kvalign.eval import plots
from kvalign.eval.report_tables import Table, table, tables_by_cache, without_repeats
from kvalign.eval.results_folder import Results
from kvalign.eval.rows import means

Document = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Plot:
    """A figure, its file name without ending, and what it shows, for those who cannot see it."""

    name: str
    figure: Figure
    caption: str


@dataclass(frozen=True)
class Section:
    title: str
    about: str
    plots: list[Plot] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of the documents it is made of


def sections(results: Results) -> list[Section]:
    """Those for which there are results, in the order of reading; passages are apart."""
    makers = {
        "perplexity": [_perplexity, _drift, _total_time],
        "latency": [_latency],
        "readability": [_readability],
        "streameval": [_streameval],
        "chat": [_chat],
    }
    found = []
    for kind, makers_of_kind in makers.items():
        for make in makers_of_kind:
            if section := make(results.of(kind)):
                found.append(section)
    return found


def _perplexity(documents: dict[str, Document]) -> Section | None:
    documents = without_repeats(documents)
    if not documents:
        return None
    section = Section(
        "Perplexity",
        "exp(mean loss) over the same labels for every method at one cache size, after a first "
        "input of C + 1 tokens. The 95 % interval comes from a block bootstrap. Compare rows of "
        "equal sinks: recompute and window keep none unless asked to.",
        names=list(documents),
    )
    for name, document in documents.items():
        rows = document["rows"]
        title = f"{_model(document)}, {rows[0]['num_labels']} labels of {_corpus(document)}"
        if len({row["cache_size"] for row in rows}) > 1:
            figure = plots.perplexity_figure(rows, title)
            section.plots.append(Plot(name, figure, f"Perplexity against cache size: {title}"))
        shown = ["perplexity", "low", "high", "ratio", "ratio_low", "ratio_high", "drift"]
        sizes = ["num_labels"]
        section.tables.extend(tables_by_cache(rows, shown, sizes, title + ", C = {}"))
    return section


def _drift(documents: dict[str, Document]) -> Section | None:
    documents = without_repeats(documents)
    section = Section(
        "Drift",
        "The same perplexity as the stream goes on, in units of the cache size since the cache "
        "filled; by the reference's on the same labels where there is one, which takes the "
        "text's own ups and downs out. A line that climbs compounds an error.",
        names=list(documents),
    )
    for name, document in documents.items():
        reference = document["settings"]["reference"]
        figure_of = "ratio" if reference else "perplexity"
        panels = {}
        for cache_size in dict.fromkeys(row["cache_size"] for row in document["rows"]):
            own = [row for row in document["rows"] if row["cache_size"] == cache_size]
            points = [
                row | {"end": s["end"], "y": s[figure_of]} for row in own for s in row["segments"]
            ]
            if len(own[0]["segments"]) > 1:
                panels[f"C = {cache_size}"] = plots.series(points, "end", "y")
        if panels:
            y = f"perplexity by {reference}'s" if reference else "perplexity"
            x = "cache sizes since it filled"
            figure = plots.draw(panels, x=x, y=y, doubling_x=True, log_y=True)
            caption = f"{y} as the stream goes on: {_model(document)}, {_corpus(document)}"
            section.plots.append(Plot(f"{name}-drift", figure, caption))
    return section if section.plots else None


def _total_time(documents: dict[str, Document]) -> Section | None:
    documents = {n: d for n, d in documents.items() if d["settings"]["stepwise"]}
    if not documents:
        return None
    section = Section(
        "Perplexity against total time",
        "Every method made to step token by token, as it does when it generates (the paper's "
        "figure 3); a point is one cache size. To the lower left is better.",
        names=list(documents),
    )
    for name, document in documents.items():
        rows = document["rows"]
        title = f"{_model(document)}, {rows[0]['num_labels']} labels of {_corpus(document)}"
        figure = plots.draw(
            {title: plots.series(rows, "seconds", "perplexity")},
            x="total time, s",
            y="perplexity (lower is better)",
            log_x=True,
            log_y=True,
        )
        section.plots.append(Plot(name, figure, f"Perplexity against total time: {title}"))
        shown = ["perplexity", "seconds"]
        sizes: list[str] = []
        section.tables.extend(tables_by_cache(rows, shown, sizes, title + ", C = {}"))
    return section


def _latency(documents: dict[str, Document]) -> Section | None:
    if not documents:
        return None
    section = Section(
        "Time per token",
        "Steps with a full cache, eviction and realignment in the clock, methods taking turns in "
        "one process (the paper's figure 4). Lines are medians, whiskers reach to the 90th "
        "percentile. The first token is timed apart: of a prompt longer than the cache, recompute "
        "and discard-half read only what they keep.",
        names=list(documents),
    )
    for name, document in documents.items():
        rows = document["rows"]
        panels = {
            f"{_model(document)}, batch {size}": plots.series(
                [row for row in rows if row["batch_size"] == size],
                "cache_size",
                "median_ms",
                "p90_ms",
            )
            for size in dict.fromkeys(row["batch_size"] for row in rows)
        }
        y = "ms/token (lower is better)"
        figure = plots.draw(panels, x="cache size (entries)", y=y, doubling_x=True, log_y=True)
        section.plots.append(Plot(name, figure, f"Time per token: {_model(document)}"))
        shown = ["median_ms", "mean_ms", "p90_ms", "p99_ms", "ratio", "ttft_ms", "peak_mb"]
        sizes = ["batch_size"]
        section.tables.extend(tables_by_cache(rows, shown, sizes, _model(document) + ", C = {}"))
    return section


def _readability(documents: dict[str, Document]) -> Section | None:
    if not documents:
        return None
    section = Section(
        "Readability",
        "Every method continues the same prompts with the same seed. A chunk is 10 NLTK tokens; it "
        "is readable if at least half of them are in the word list (or their stems) or end a "
        "sentence. That counts words and no sense, so repetition stands beside it. Means over the "
        "prompts; the passages are below.",
        names=list(documents),
    )
    shown = [
        "readable",
        "distinct_1",
        "distinct_2",
        "repetition",
        "longest_run",
        "dense_perplexity",
    ]
    sizes = ["no_repeat_ngram_size", "num_passages"]
    for document in documents.values():
        title = f"{_model(document)}, words: {document['word_list']['name']}, C = {{}}"
        section.tables.extend(tables_by_cache(means(document["rows"]), shown, sizes, title))
    return section


def _streameval(documents: dict[str, Document]) -> Section | None:
    if not documents:
        return None
    section = Section(
        "StreamEval",
        "Lines that register a number, and every few lines a query for the one some lines back. "
        "An answer is right if greedy decoding gives it exactly; its loss tells models that cannot "
        "do it apart. What is no longer in the cache cannot be answered by any method.",
        names=list(documents),
    )
    for name, document in documents.items():
        rows = document["rows"]
        panels = {
            f"{_model(document)}, C = {cache_size}": plots.series(
                [row for row in rows if row["cache_size"] == cache_size],
                "distance_lines",
                "answer_nll_nats",
            )
            for cache_size in dict.fromkeys(row["cache_size"] for row in rows)
        }
        y = "loss of the right answer, nats"
        figure = plots.draw(panels, x="lines back", y=y)
        caption = f"Loss of the right answer against distance: {_model(document)}"
        section.plots.append(Plot(name, figure, caption))
        for panel in panels:
            own = [r for r in rows if panel.endswith(f"C = {r['cache_size']}")]
            shown = ["accuracy", "answer_nll_nats", "in_cache", "distance_tokens"]
            section.tables.append(table(panel, own, shown, ["distance_lines"]))
    return section


def _chat(documents: dict[str, Document]) -> Section | None:
    if not documents:
        return None
    section = Section(
        "Conversations in one stream",
        "Turns are fed one after another through one stream that never ends; each answer is judged "
        "by its words, not by whether it is right.",
        names=list(documents),
    )
    for name, document in documents.items():
        rows = [row | {"number": row["answer"] + 1} for row in document["rows"]]
        panels = {
            f"{_model(document)}, C = {cache_size}": plots.series(
                [row for row in rows if row["cache_size"] == cache_size], "number", "readable"
            )
            for cache_size in dict.fromkeys(row["cache_size"] for row in rows)
        }
        y = "readable chunks of the answer"
        figure = plots.draw(panels, x="answer", y=y)
        section.plots.append(Plot(name, figure, f"{y}, one after another: {_model(document)}"))
        shown = ["readable", "distinct_2", "repetition", "longest_run", "dense_perplexity"]
        sizes = ["num_passages"]
        title = _model(document) + ", C = {}"
        section.tables.extend(tables_by_cache(means(document["rows"]), shown, sizes, title))
    return section


def _model(document: Document) -> str:
    return str(document["settings"]["model"])


def _corpus(document: Document) -> str:
    return str(document["settings"]["corpus"])
