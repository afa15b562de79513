"""Progress of a sweep: a live table in a terminal, else a line as each trial ends."""

import math
import sys
from typing import Any, ClassVar

from ray.tune import Callback
from ray.tune.experiment import Trial
from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvalign.foundation import progress
from kvalign.training.sweep_trial import POINT


class Watch(Callback):
    """Writes to stderr. It holds no state, because Ray pickles it and restores it with a sweep."""

    live: ClassVar[Live | None] = None

    def on_step_end(self, trials: list[Trial], **_: Any) -> None:
        """Draw the table again: Ray calls this after each event."""
        if not sys.stderr.isatty():
            return
        if Watch.live is None:
            Watch.live = Live(console=Console(stderr=True), auto_refresh=False)
            Watch.live.start()
        Watch.live.update(table(trials), refresh=True)

    def on_trial_complete(self, trials: list[Trial], trial: Trial, **_: Any) -> None:
        _print_line(trials, trial, _ended(trial))

    def on_trial_error(self, trials: list[Trial], trial: Trial, **_: Any) -> None:
        _print_line(trials, trial, f"failed (see error.txt in {trial.path})")

    @staticmethod
    def close() -> None:
        """Leave the last table where it is, with the cursor below it."""
        if Watch.live is not None:
            Watch.live.stop()
            Watch.live = None


def table(trials: list[Trial]) -> Table:
    """A row a trial, the best so far marked."""
    rows = Table(*("trial", *POINT, "report", "val_loss", "best so far", "state"))
    best = min(map(best_loss, trials), default=math.inf)
    for trial in trials:
        last, lowest = trial.last_result or {}, best_loss(trial)
        *sizes, lr = (trial.config[name] for name in POINT)
        rows.add_row(
            *map(str, (trial, *sizes)),
            f"{lr:.3g}",
            f"{last['report']} of {last['max_reports']}" if "report" in last else "",
            f"{last['val_loss']:.4g}" if "report" in last else "",
            f"{lowest:.4g}" + (" ★" if lowest == best else "") if lowest < math.inf else "",
            state_of(trial),
        )
    return rows


def line(trials: list[Trial], trial: Trial, state: str) -> str:
    """A trial's end on one line."""
    last, point = trial.last_result or {}, trial.config
    reached = f" after report {last['report']} of {last['max_reports']}" if "report" in last else ""
    best, lowest = min(map(best_loss, trials), default=math.inf), best_loss(trial)
    measured = "no val loss"
    if lowest < math.inf:
        measured = f"val loss {lowest:.4g} (best so far {best:.4g})"
    return (
        f"trial {trial} {state}{reached}: hidden {point['hidden1']}, {point['hidden2']}; "
        f"batch size {point['batch_size']}; lr {point['lr']:.3g}; {measured}"
    )


def best_loss(trial: Trial) -> float:
    """Infinite for a trial that has none."""
    lowest = trial.metric_analysis.get("val_loss", {}).get("min", math.inf)
    return lowest if math.isfinite(lowest) else math.inf


def state_of(trial: Trial) -> str:
    if trial.status == Trial.TERMINATED:
        return _ended(trial)
    return "failed" if trial.status == Trial.ERROR else trial.status.lower()


def _ended(trial: Trial) -> str:
    return "finished" if (trial.last_result or {}).get("is_last") else "stopped"


def _print_line(trials: list[Trial], trial: Trial, state: str) -> None:
    progress.advance(1)
    if not sys.stderr.isatty():
        print(line(trials, trial, state), file=sys.stderr, flush=True)
