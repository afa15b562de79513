"""Sweeps of a suite (`kvalign tune`): their trials, and the best beside the paper's."""

from collections.abc import Mapping
from typing import Any

from kvalign.eval.protocol.evaluation import Column, Table
from kvalign.eval.report.suite_file import PaperSweep
from kvalign.foundation.console import Entry

ABOUT = (
    "Trials of kvalign tune, drawn at random from the search space of the paper's table 1, "
    "best first; ASHA stops those that fall behind."
)
FIGURES = {
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
    **{name: column for name, column in FIGURES.items() if name != "input_label_mse"},
    "num_reports": Column("reports", about="validations; ASHA decides after each"),
    "seconds": Column("s", 1),
}


Sweep = dict[str, Any]
"""Document of `kvalign tune --json`."""


def tables(sweeps: Mapping[str, Sweep]) -> list[Table]:
    """The trials of each sweep."""
    return [
        Table(
            f"{name}: {sweep['target']} network",
            [*_TRIAL.values()],
            [[Entry(c.text(t.get(key))) for key, c in _TRIAL.items()] for t in sweep["trials"]],
        )
        for name, sweep in sweeps.items()
    ]


def beside(paper: list[PaperSweep], sweeps: Mapping[str, Sweep]) -> Table:
    """Best trials of the paper's sweeps and of ours, a row each."""
    columns, lines = [Column("sweep, best trial", None), *FIGURES.values()], []
    for one in paper:
        sweep = sweeps.get(one.cell)
        ours = sweep and sweep["best"] | {"input_label_mse": sweep["input_label_mse"]}
        for whose, figures in (("the paper", one.best), ("ours", ours)):
            values = [column.text((figures or {}).get(name)) for name, column in FIGURES.items()]
            label = f"{one.cell}, {whose}" + ("" if figures else ": not run")
            lines.append([Entry(label), *map(Entry, values)])
    return Table("Tuning (the paper's table 1)", columns, lines)
