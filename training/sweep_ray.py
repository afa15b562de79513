"""Trials of a sweep in Ray Tune: drawn at random, stopped early by ASHA, resumed after a kill.

ASHA is Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning".
"""

import math
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial as RayTrial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import BasicVariantGenerator

from kvalign.foundation import progress
from kvalign.training.kinds import NetworkSettings
from kvalign.training.settings import TuneSettings
from kvalign.training.sweep_trial import HIDDEN, PLACE, POINT, Trial, run_trial


def tuner(folder: Path, settings: TuneSettings, base: NetworkSettings) -> tune.Tuner:
    """All trials, which share `base`, or those that a killed sweep has not finished in a folder."""
    trainable = tune.with_resources(
        tune.with_parameters(run_trial, base=base, folder=folder),
        {"cpu": settings.cpus_per_trial, "gpu": settings.gpus_per_trial},
    )
    if list(folder.glob("experiment_state-*.json")):
        return tune.Tuner.restore(str(folder), trainable, restart_errored=True)
    space = {
        **{name: tune.choice(list(settings.hidden_sizes)) for name in HIDDEN},
        "batch_size": tune.choice(list(settings.batch_sizes)),
        "lr": tune.loguniform(settings.min_lr, settings.max_lr),
    }
    sizes = {name: getattr(base, f"{base.target}_{name}") for name in HIDDEN}
    defaults = {**sizes, "batch_size": base.batch_size, "lr": base.lr}
    config = tune.TuneConfig(
        metric="val_loss",
        mode="min",
        num_samples=settings.num_trials,
        scheduler=scheduler(settings),
        search_alg=BasicVariantGenerator(
            points_to_evaluate=[defaults] if settings.search == "defaults-first" else None,
            max_concurrent=settings.num_concurrent or 0,
            random_state=settings.seed,
        ),
        trial_name_creator=_name,
        trial_dirname_creator=_name,
    )
    place = dict(name=folder.name, storage_path=str(folder.parent))
    run = tune.RunConfig(**place, callbacks=[Watch()], verbose=0)
    return tune.Tuner(trainable, param_space=space, tune_config=config, run_config=run)


def scheduler(settings: TuneSettings) -> TrialScheduler:
    """Scheduler that stops trials, comparing them at the same amount of data."""
    if settings.scheduler == "none":
        return FIFOScheduler()
    return ASHAScheduler(
        time_attr=PLACE,
        # Beyond the last report: at `max_t` itself every trial would be stopped.
        max_t=settings.max_epochs * settings.vals_per_epoch + 1,
        grace_period=settings.grace_reports,
        reduction_factor=settings.reduction_factor,
    )


def trial_of(result: tune.Result) -> Trial:
    """A trial's own records, without what was reported again after a kill."""
    table = result.metrics_dataframe
    reports = []
    if table is not None and "report" in table:
        once = table.drop_duplicates("report", keep="last")
        reports = once.sort_values("report").to_dict("records")
    error = str(result.error or "").strip().splitlines()
    point = {name: result.config[name] for name in POINT}
    return Trial(Path(result.path).name, point, reports, error[-1] if error else "")


def _name(trial: RayTrial) -> str:
    return f"{int(trial.trial_id.rpartition('_')[2]):03d}"


class Watch(tune.Callback):
    """Counter of trials that writes a line to stderr for each. It has no state, because Ray pickles
    it and restores it with a sweep.
    """

    def on_trial_complete(self, trials: list[RayTrial], trial: RayTrial, **_: Any) -> None:
        is_last = (trial.last_result or {}).get("is_last")
        progress.say(line(trials, trial, "finished" if is_last else "stopped"))
        progress.advance(1)

    def on_trial_error(self, trials: list[RayTrial], trial: RayTrial, **_: Any) -> None:
        progress.say(line(trials, trial, f"failed (see error.txt in {trial.path})"))
        progress.advance(1)


def line(trials: list[RayTrial], trial: RayTrial, state: str) -> str:
    """End of a trial in one line."""
    last, point = trial.last_result or {}, trial.config
    reached = f" after report {last['report']} of {last['max_reports']}" if "report" in last else ""
    measured = "no val loss"
    if (lowest := _best_loss(trial)) < math.inf:
        measured = f"val loss {lowest:.4g} (best so far {min(map(_best_loss, trials)):.4g})"
    start = f"trial {trial} {state}{reached}: "
    if "lr" not in point:  # it failed before it was given any
        return start + measured
    return (
        f"{start}hidden {point['hidden1']}, {point['hidden2']}; "
        f"batch size {point['batch_size']}; lr {point['lr']:.3g}; {measured}"
    )


def _best_loss(trial: RayTrial) -> float:
    """Lowest loss; infinite without one."""
    lowest = trial.metric_analysis.get("val_loss", {}).get("min", math.inf)
    return lowest if math.isfinite(lowest) else math.inf
