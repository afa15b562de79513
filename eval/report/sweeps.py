"""Sweeps of a suite (`kvalign tune`): their trials, and the best beside the paper's."""

from collections.abc import Mapping

from pydantic import BaseModel

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


class Trial(BaseModel):
    """Trial of a sweep; missing figures failed with it."""

    trial: str
    state: str
    hidden1: int
    hidden2: int
    batch_size: int
    lr: float
    val_loss: float | None = None
    num_reports: int
    seconds: float | None = None


class Sweep(BaseModel):
    """Document of `kvalign tune --json`, as far as it is shown."""

    target: str
    best: Trial
    trials: list[Trial]
    input_label_mse: float

    @property
    def figures(self) -> dict[str, float | None]:
        """Figures of the best trial by the names of `FIGURES`."""
        return self.best.model_dump() | {"input_label_mse": self.input_label_mse}


def tables(sweeps: Mapping[str, Sweep]) -> list[Table]:
    """The trials of each sweep."""
    tables = []
    for name, sweep in sweeps.items():
        rows = [
            [Entry(column.text(getattr(trial, figure))) for figure, column in _TRIAL.items()]
            for trial in sweep.trials
        ]
        tables.append(Table(f"{name}: {sweep.target} network", [*_TRIAL.values()], rows))
    return tables


def beside(paper: list[PaperSweep], sweeps: Mapping[str, Sweep]) -> Table:
    """Best trials of the paper's sweeps and of ours, a row each."""
    columns, lines = [Column("sweep, best trial", None), *FIGURES.values()], []
    for sweep in paper:
        ours = sweeps[sweep.cell].figures if sweep.cell in sweeps else None
        for whose, figures in (("the paper", sweep.best), ("ours", ours)):
            values = [column.text((figures or {}).get(name)) for name, column in FIGURES.items()]
            label = f"{sweep.cell}, {whose}" + ("" if figures else ": not run")
            lines.append([Entry(label), *map(Entry, values)])
    return Table("Tuning (the paper's table 1)", columns, lines)
