"""What a report shows of a folder of results: a summary, each evaluation's sections, passages."""

from kvalign.eval.evaluation import Column, Row, Section
from kvalign.eval.evaluations import EVALUATIONS
from kvalign.eval.passages import Panel
from kvalign.eval.results_folder import Results
from kvalign.eval.rows import grouped, label_of
from kvalign.eval.tables import Table, table


def summary(results: Results) -> list[Table]:
    """The chief figures of all evaluations side by side: a table for each model and cache size that
    more than one of them has measured.

    Of several documents of one evaluation that measured the same, the first counts.
    """
    columns: dict[str, Column] = {}
    lines: dict[tuple[str, int], dict[str, Row]] = {}  # by model and cache size, by label
    measured: dict[tuple[str, int], set[str]] = {}  # names of evaluations
    for name, evaluation in EVALUATIONS.items():
        summary_columns = evaluation.summary_columns
        columns |= {f"{name}.{key}": column for key, column in summary_columns.items()}
        for document in evaluation.chosen(results.of(name)).values():
            by_size = grouped(evaluation.summary_rows(document), "cache_size")
            for cache_size, rows in by_size.items():
                place = (document["settings"]["model"], cache_size)
                if name in measured.setdefault(place, set()):
                    continue
                measured[place].add(name)
                for row in rows:
                    line = lines.setdefault(place, {}).setdefault(label_of(row), dict(row))
                    for key in summary_columns:
                        line.setdefault(f"{name}.{key}", row.get(key))
    most = max(map(len, measured.values()), default=0)
    return [
        table(f"{model}, C = {cache_size}", list(rows.values()), columns)
        for (model, cache_size), rows in lines.items()
        if len(measured[model, cache_size]) > 1 or most == 1
    ]


def sections(results: Results) -> list[Section]:
    """Those that have something to show, in the order of the evaluations."""
    return [
        section
        for name, evaluation in EVALUATIONS.items()
        for section in evaluation.sections(results.of(name))
        if section.plots or section.tables
    ]


def panels(results: Results) -> list[Panel]:
    """The passages of all documents that have some."""
    return [
        panel
        for name, evaluation in EVALUATIONS.items()
        for document in results.of(name).values()
        for panel in evaluation.panels(document)
    ]
