"""The paper's figures beside ours; a suite lists them (`paper:` of its file)."""

from kvalign.console import Entry
from kvalign.errors import UserError
from kvalign.eval.evaluation import Column
from kvalign.eval.evaluations import EVALUATIONS
from kvalign.eval.results_folder import Results
from kvalign.eval.rows import method_name
from kvalign.eval.suite_file import PaperTable
from kvalign.eval.tables import METHOD, Table


def paper_tables(results: Results) -> list[Table]:
    """A table each: a row a method, and for every cache size the paper's figure and ours; "not run"
    where there is none.

    Raises:
        UserError: the suite names a metric that its cell does not measure.
    """
    return [_beside(table, results) for table in results.suite.paper.tables]


def _beside(paper: PaperTable, results: Results) -> Table:
    document = results.documents.get(paper.cell, {"kind": "", "rows": []})
    column = _column(paper, document["kind"].removeprefix("eval "))
    ours = {
        (method_name(row), row["cache_size"]): row.get(paper.metric) for row in document["rows"]
    }
    sizes = list(dict.fromkeys(size for figures in paper.rows.values() for size in figures))
    columns = [METHOD]
    for size in sizes:
        columns += [
            Column(f"C = {size}, paper", column.digits, column.better),
            Column("ours", column.digits, column.better, column.about),
        ]
    rows = [
        [
            Entry(method),
            *(
                Entry(column.text(figure) or "not run")
                for size in sizes
                for figure in (figures.get(size), ours.get((method, size)))
            ),
        ]
        for method, figures in paper.rows.items()
    ]
    return Table(paper.title, columns, rows)


def _column(paper: PaperTable, name: str) -> Column:
    """The column of a metric in the evaluation of that name, or in any if it has not been run."""
    for evaluation in [EVALUATIONS[name]] if name in EVALUATIONS else EVALUATIONS.values():
        if column := evaluation.all_columns.get(paper.metric):
            return column
    raise UserError(
        f"the suite's paper table {paper.title!r} names the metric {paper.metric!r}, which "
        f"{paper.cell} does not measure"
    )
