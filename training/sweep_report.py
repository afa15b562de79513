"""Files of a sweep: tables of its trials and their reports, and two plots."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kvalign.eval.drawing.plots import INK, Series, draw, save
from kvalign.foundation.files import write_text

_REPORT = ("report", "epochs", "val_loss", "seconds")
# Colour, marker and label: told apart without colour too.
_STYLES = {
    "stopped": (("#808080", "v"), "stopped early"),
    "finished": (("#1F83C4", "o"), "finished"),
    "failed": ((INK, "x"), "failed"),
    "best": (("#D55E00", "*"), "best trial"),
}


@dataclass(frozen=True)
class Trial:
    """Trial of a sweep, as it ended."""

    name: str
    point: Mapping[str, Any]  # hidden1, hidden2, batch_size, lr
    reports: list[dict[str, Any]]  # of `sweep_trial.Reports`, in order, each once
    error: str = ""  # one line, of a failed trial

    @property
    def val_loss(self) -> float | None:
        """Lowest validation loss; None if none is finite."""
        finite = [r["val_loss"] for r in self.reports if math.isfinite(r["val_loss"])]
        return min(finite, default=None)

    @property
    def state(self) -> str:
        """`finished` (early stopping included), `stopped` by the scheduler, or `failed`."""
        if self.error or self.val_loss is None:
            return "failed"
        return "finished" if self.reports[-1]["is_last"] else "stopped"

    @property
    def row(self) -> dict[str, Any]:
        last = self.reports[-1] if self.reports else {}
        return {
            "trial": self.name,
            **self.point,
            "num_reports": len(self.reports),
            "state": self.state,
            "val_loss": self.val_loss,
            **{name: last.get(name) for name in ("num_parameters", "seconds")},
        }


def ranked(trials: list[Trial]) -> list[Trial]:
    """Trials by validation loss, lowest first, failed ones last."""
    losses = {t.name: math.inf if t.val_loss is None else t.val_loss for t in trials}
    return sorted(trials, key=lambda trial: (trial.state == "failed", losses[trial.name]))


def write(out: Path, trials: list[Trial], kv: str) -> None:
    """Write trials.csv, reports.csv, and the plots; the first of `trials` is the best."""
    reports = [{"trial": t.name} | {k: r[k] for k in _REPORT} for t in trials for r in t.reports]
    rows = pd.DataFrame([trial.row for trial in trials])
    write_text(out / "trials.csv", rows.to_csv(index=False))
    write_text(out / "reports.csv", pd.DataFrame(reports).to_csv(index=False))
    title, y = f"{kv} network: {len(trials)} trials", "validation loss (lower is better)"
    lines, points = [], []
    for trial in reversed(trials):  # the best on top
        is_best = trial is trials[0]
        lines.append(_series(trial, is_best, [(r["epochs"], r["val_loss"]) for r in trial.reports]))
        if trial.val_loss is not None:
            best = (trial.row["num_parameters"], trial.val_loss)
            points.append(_series(trial, is_best, [best]))
    x = "epochs, with a mark at each validation report"
    by_report = draw({title: lines}, x=x, y=y, log_y=_is_wide(lines))
    y = f"best {y}"
    by_size = draw({title: points}, x="parameters", y=y, log_x=True, log_y=_is_wide(points))
    for ending in (".png", ".svg"):
        save(by_report, out / f"loss-by-report{ending}")
        save(by_size, out / f"loss-by-size{ending}")


def _series(trial: Trial, is_best: bool, points: list[tuple[float, float]]) -> Series:
    style, label = _STYLES["best" if is_best else trial.state]
    points = [point for point in points if math.isfinite(point[1])]
    return Series(label, (*style, "-"), [x for x, _ in points], [y for _, y in points])


def _is_wide(lines: list[Series]) -> bool:
    """Return whether a log axis has round values enough to read it by."""
    values = [value for series in lines for value in series.y]
    return max(values) > 2 * min(values)
