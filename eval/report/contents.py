"""Contents of a report on a folder of results."""

from collections.abc import Hashable, Mapping
from dataclasses import replace

from kvalign.eval.evaluations import EVALUATIONS
from kvalign.eval.protocol import Column, Panel, Row, Section, Table
from kvalign.eval.protocol.tables import METHOD, grouped, identity_of, method_name, renamed, table
from kvalign.eval.report.results_folder import PaperSweep, PaperTable, Results, Sweep
from kvalign.foundation.console import Entry
from kvalign.foundation.errors import UserError

TUNING = (
    "Trials of kvalign tune, drawn at random from the search space of the paper's table 1, "
    "best first; ASHA stops those that fall behind."
)
TUNED = {
    "hidden1": Column("hidden 1"),
    "hidden2": Column("hidden 2"),
    "batch_size": Column("batch"),
    "lr": Column("learning rate", 5),
    "val_loss": Column("validation loss", 5, "lower", "mean squared error per number"),
    "input_label_mse": Column("left stale", 5, about="the same error without realignment"),
}
_TRIAL = {
    "trial": Column("trial", None),
    "state": Column("state", None),
    **{name: column for name, column in TUNED.items() if name != "input_label_mse"},
    "num_reports": Column("reports", about="validations; ASHA decides after each"),
    "seconds": Column("s", 1),
}


def summary(results: Results) -> list[Table]:
    """Summary of all evaluations side by side: a table for each model and cache size that more than
    one of them has measured.

    Documents of one evaluation and one subject (`Evaluation.title`) are merged. Of equal rows, and
    of subjects, the first counts. Aligners get names that differ within a table.
    """
    columns = {  # an evaluation's rows have its name before their figures' names
        f"{name}.{key}": replace(column, ends=ends and (f"{name}.{ends[0]}", f"{name}.{ends[1]}"))
        for name, evaluation in EVALUATIONS.items()
        for key, column in evaluation.summary_columns.items()
        for ends in [column.ends]
    }
    references: dict[str, str | None] = {}
    # By model and size, by evaluation: what was measured first, and its rows by what they are of.
    measured: dict[tuple[str, int], dict[str, tuple[str, dict[Hashable, Row]]]] = {}
    for name, evaluation in EVALUATIONS.items():
        for document in evaluation.select(results.of(name)).values():
            subject, settings = evaluation.title(document), document["settings"]
            if any(column.by_reference for column in evaluation.summary_columns.values()):
                references.setdefault(settings["model"], settings.get("reference"))
            by_size = grouped(evaluation.summary_rows(document), "cache_size")
            for cache_size, rows in by_size.items():
                by_name = measured.setdefault((settings["model"], cache_size), {})
                first, by_identity = by_name.setdefault(name, (subject, {}))
                if first == subject:
                    by_identity |= {identity_of(row): row for row in rows} | by_identity
    most = max(map(len, measured.values()), default=0)
    tables = []
    for (model, cache_size), by_name in measured.items():
        lines: dict[Hashable, Row] = {}
        for name, (_, by_identity) in by_name.items():
            for identity, row in by_identity.items():
                figures = {f"{name}.{key}": value for key, value in row.items()}
                lines[identity] = figures | lines.get(identity, row)
        if len(by_name) > 1 or most == 1:
            title, reference = f"{model}, C = {cache_size}", references.get(model)
            tables.append(table(title, renamed(lines.values()), columns, reference))
    return tables


def sections(results: Results) -> list[Section]:
    """Sections with content: sweeps, then the evaluations in their order."""
    tuning = Section("Tuning", TUNING, [], [], _trials(results.sweeps))
    parts = [s for name, e in EVALUATIONS.items() for s in e.sections(results.of(name))]
    return [section for section in (tuning, *parts) if section.plots or section.tables]


def panels(results: Results) -> list[Panel]:
    return [
        panel
        for name, evaluation in EVALUATIONS.items()
        for document in results.of(name).values()
        for panel in evaluation.panels(document)
    ]


def paper_tables(results: Results) -> list[Table]:
    """Tables of the suite's `paper:` entry: a row for each method, and for every cache size the
    paper's figure and ours; "not run" without one.

    Raises:
        UserError: the suite names a metric that its cell does not measure.
    """
    paper = results.suite.paper
    tuning = [_best_trials(paper.sweeps, results.sweeps)] if paper.sweeps else []
    return tuning + [_beside(one, results) for one in paper.tables]


def _beside(paper: PaperTable, results: Results) -> Table:
    document = results.documents.get(paper.cell)
    name = document["kind"].removeprefix("eval ") if document else ""
    column = _column(paper, name)
    rows = EVALUATIONS[name].rows(document) if document else []
    ours = {  # of several settings of a method the first
        (method_name(row), row["cache_size"]): row.get(paper.metric) for row in reversed(rows)
    }
    columns, lines = [METHOD], {method: [Entry(method)] for method in paper.rows}
    for size in dict.fromkeys(size for figures in paper.rows.values() for size in figures):
        columns.append(Column(f"C = {size}, paper", column.digits, column.better))
        columns.append(Column("ours", column.digits, column.better, column.about))
        for method, figures in paper.rows.items():
            for figure in (figures.get(size), ours.get((method, size))):
                lines[method].append(Entry(column.text(figure) or "not run"))
    return Table(paper.title, columns, list(lines.values()))


def _column(paper: PaperTable, name: str) -> Column:
    """The column of a metric in the evaluation of that name, or in any if it has not been run."""
    for evaluation in [EVALUATIONS[name]] if name in EVALUATIONS else EVALUATIONS.values():
        if column := {**evaluation.columns, **evaluation.more_columns}.get(paper.metric):
            return column
    raise UserError(
        f"the suite's paper table {paper.title!r} names the metric {paper.metric!r}, which "
        f"{paper.cell} does not measure"
    )


def _trials(sweeps: Mapping[str, Sweep]) -> list[Table]:
    """The trials of each sweep."""
    return [
        Table(
            f"{name}: {sweep['target']} network",
            [*_TRIAL.values()],
            [[Entry(c.text(t.get(key))) for key, c in _TRIAL.items()] for t in sweep["trials"]],
        )
        for name, sweep in sweeps.items()
    ]


def _best_trials(paper: list[PaperSweep], sweeps: Mapping[str, Sweep]) -> Table:
    """Best trials of the paper's sweeps and of ours, a row each."""
    columns, lines = [Column("sweep, best trial", None), *TUNED.values()], []
    for one in paper:
        sweep = sweeps.get(one.cell)
        ours = sweep and sweep["best"] | {"input_label_mse": sweep["input_label_mse"]}
        for whose, figures in (("the paper", one.best), ("ours", ours)):
            values = [column.text((figures or {}).get(name)) for name, column in TUNED.items()]
            label = f"{one.cell}, {whose}" + ("" if figures else ": not run")
            lines.append([Entry(label), *map(Entry, values)])
    return Table("Tuning (the paper's table 1)", columns, lines)
