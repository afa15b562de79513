"""Tables of the report: cells with the best marked, and the summary over all evaluations."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from kvalign.eval.metrics import METRICS, Better, best
from kvalign.eval.results_folder import Results
from kvalign.eval.rows import label_of, means

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A heading; `better` says which direction is, `about` what the figure is."""

    title: str
    is_number: bool = False
    better: Better = ""
    about: str = ""


@dataclass(frozen=True)
class Entry:
    text: str
    is_best: bool = False


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[Column]
    rows: list[list[Entry]]


_SIZES = {"batch_size": "batch", "no_repeat_ngram_size": "no repeated n-gram"}
_SIZES |= {"distance_lines": "lines back", "num_passages": "passages", "num_labels": "labels"}


def table(title: str, rows: list[Row], metrics: list[str], sizes: list[str]) -> Table:
    """A row of results each, the best of every metric marked among the rows.

    Args:
        title: what the table is of.
        rows: dicts of results; a metric that is in none of them makes no column.
        metrics: names in `METRICS`.
        sizes: further columns, before the metrics.
    """
    there = [name for name in metrics if any(row.get(name) is not None for row in rows)]
    known = [METRICS[name] for name in there]
    tops = [best([row.get(n) for row in rows], METRICS[n].better) for n in there]
    columns = [Column("method"), *(Column(_SIZES[name], True) for name in sizes)]
    columns += [Column(metric.title, True, metric.better, metric.about) for metric in known]
    lines = []
    for i, row in enumerate(rows):
        line = [Entry(label_of(row)), *(Entry(_plain(row.get(name))) for name in sizes)]
        for name, metric, top in zip(there, known, tops, strict=True):
            line.append(Entry(metric.text(row.get(name)), i in top))
        lines.append(line)
    return Table(title, columns, lines)


def tables_by_cache(
    rows: list[Row], metrics: list[str], sizes: list[str], title: str = "C = {}"
) -> list[Table]:
    """One table a cache size, so that the best is among methods which keep as much."""
    found = dict.fromkeys(row["cache_size"] for row in rows)
    return [
        table(title.format(c), [r for r in rows if r["cache_size"] == c], metrics, sizes)
        for c in found
    ]


def without_repeats(documents: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Perplexity documents less those that stepped through a text for their times alone, while
    another scored more of it.
    """
    scored = {
        (d["settings"]["model"], d["settings"]["corpus"])
        for d in documents.values()
        if not d["settings"]["stepwise"]
    }
    return {
        name: d
        for name, d in documents.items()
        if not d["settings"]["stepwise"]
        or (d["settings"]["model"], d["settings"]["corpus"]) not in scored
    }


_SUMMARY = {
    "perplexity": ["perplexity", "ratio", "drift"],
    "latency": ["median_ms", "ttft_ms", "peak_mb"],
    "readability": ["readable", "repetition"],
    "streameval": ["accuracy", "answer_nll_nats"],
    "chat": ["chat"],
}


def summary(results: Results) -> list[Table]:
    """One table for each model and cache size that more than one evaluation has measured."""
    cells: dict[tuple[Any, ...], dict[str, Row]] = {}
    kinds: Counter[tuple[Any, ...]] = Counter()
    for kind in _SUMMARY:
        for place, rows in _for_summary(results, kind).items():
            kinds[place] += 1
            for row in rows:
                key = label_of(row)
                merged = cells.setdefault(place, {}).setdefault(key, {})
                merged |= {name: v for name, v in row.items() if name not in merged}
    most = max(kinds.values(), default=0)
    metrics = [name for names in _SUMMARY.values() for name in names]
    return [
        table(f"{place[0]}, C = {place[1]}", list(rows.values()), metrics, [])
        for place, rows in cells.items()
        if kinds[place] > 1 or most == 1
    ]


def _for_summary(results: Results, kind: str) -> dict[tuple[Any, ...], list[Row]]:
    """The rows of one kind by model and cache size; of several documents, those of the first that
    has the size.
    """
    found: dict[tuple[Any, ...], list[Row]] = {}
    documents = results.of(kind)
    for document in (without_repeats(documents) if kind == "perplexity" else documents).values():
        rows = document["rows"]
        if kind == "latency":
            rows = [row for row in rows if row["batch_size"] == rows[0]["batch_size"]]
        if kind == "readability":
            first = rows[0]["no_repeat_ngram_size"]
            rows = means([row for row in rows if row["no_repeat_ngram_size"] == first])
        if kind == "chat":
            rows = [row | {"chat": row["readable"]} for row in means(rows)]
        if kind == "streameval":
            rows = means([{k: v for k, v in r.items() if k != "distance_lines"} for r in rows])
        keep = (*_SUMMARY[kind], "method", "aligner", "num_sinks", "num_evicted")
        own: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            place = (document["settings"]["model"], row["cache_size"])
            own.setdefault(place, []).append({k: v for k, v in row.items() if k in keep})
        for place, lines in own.items():
            found.setdefault(place, lines)
    return found


def _plain(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)
