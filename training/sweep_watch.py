"""Lines about each trial of a sweep that ends."""

import math
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial

from kvalign.foundation import progress


class Watch(Callback):
    """Counter of trials that writes a line to stderr for each. It has no state, because Ray pickles
    it and restores it with a sweep.
    """

    def on_trial_complete(self, trials: list[Trial], trial: Trial, **_: Any) -> None:
        is_last = (trial.last_result or {}).get("is_last")
        self._say(trials, trial, "finished" if is_last else "stopped")

    def on_trial_error(self, trials: list[Trial], trial: Trial, **_: Any) -> None:
        self._say(trials, trial, f"failed (see error.txt in {trial.path})")

    def _say(self, trials: list[Trial], trial: Trial, state: str) -> None:
        progress.say(line(trials, trial, state))
        progress.advance(1)


def line(trials: list[Trial], trial: Trial, state: str) -> str:
    """End of a trial in one line."""
    last, point = trial.last_result or {}, trial.config
    reached = f" after report {last['report']} of {last['max_reports']}" if "report" in last else ""
    best, lowest = min(map(best_loss, trials)), best_loss(trial)
    measured = "no val loss"
    if lowest < math.inf:
        measured = f"val loss {lowest:.4g} (best so far {best:.4g})"
    start = f"trial {trial} {state}{reached}: "
    if "lr" not in point:  # it failed before it was given any
        return start + measured
    return (
        f"{start}hidden {point['hidden1']}, {point['hidden2']}; "
        f"batch size {point['batch_size']}; lr {point['lr']:.3g}; {measured}"
    )


def best_loss(trial: Trial) -> float:
    """Lowest loss; infinite without one."""
    lowest = trial.metric_analysis.get("val_loss", {}).get("min", math.inf)
    return lowest if math.isfinite(lowest) else math.inf
