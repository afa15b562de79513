"""Trials of a sweep in Ray Tune: drawn at random, stopped early by ASHA, resumed after a kill.

ASHA is Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning".
"""

import logging
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvalign.foundation.cluster import ray_session
from kvalign.foundation.errors import UserError
from kvalign.training.kinds.network import NetworkSettings
from kvalign.training.settings import TuneSettings
from kvalign.training.sweep_report import Trial
from kvalign.training.sweep_trial import HIDDEN, PLACE, POINT, run_trial

TRIALS = "trials"
# Read by Ray Tune: its new output, which would be printed beside ours, and how often it writes down
# where the sweep is, in seconds.
_ENVIRONMENT = {"RAY_AIR_NEW_OUTPUT": "0", "TUNE_GLOBAL_CHECKPOINT_S": "1"}


def run_trials(out: Path, settings: TuneSettings, base: NetworkSettings) -> list[Trial]:
    """Run all trials, which share `base`, or those that a killed sweep in `out` has not finished.

    Raises:
        UserError: no such Ray cluster, or a trial that this machine is too small for.
        KeyboardInterrupt: stopped by the user.
    """
    with _quiet(), ray_session(settings.ray_address) as ray, _locks_in(out / ".ray.partial"):
        if settings.ray_address is None:
            _check_resources(settings, ray.cluster_resources())
        from kvalign.training.sweep_watch import Watch

        results = _tuner(out, settings, base, Watch()).fit()
        if results.num_terminated + results.num_errors < len(results):
            raise KeyboardInterrupt  # Ray took it for itself
        return [_trial(result) for result in results]


def scheduler(settings: TuneSettings) -> Any:
    """Scheduler that stops trials, comparing them at the same amount of data."""
    from ray.tune.schedulers import ASHAScheduler, FIFOScheduler

    if settings.scheduler == "none":
        return FIFOScheduler()
    return ASHAScheduler(
        time_attr=PLACE,
        # Beyond the last report: at `max_t` itself every trial would be stopped.
        max_t=settings.max_epochs * settings.vals_per_epoch + 1,
        grace_period=settings.grace_reports,
        reduction_factor=settings.reduction_factor,
    )


def _tuner(out: Path, settings: TuneSettings, base: NetworkSettings, watch: Any) -> Any:
    from ray import tune
    from ray.tune.search import BasicVariantGenerator

    folder = out / TRIALS
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
    run = tune.RunConfig(name=TRIALS, storage_path=str(out), callbacks=[watch], verbose=0)
    return tune.Tuner(trainable, param_space=space, tune_config=config, run_config=run)


def _name(trial: Any) -> str:
    return f"{int(trial.trial_id.rpartition('_')[2]):03d}"


def _trial(result: Any) -> Trial:
    """A trial's own records, without what was reported again after a kill."""
    table = result.metrics_dataframe
    reports = []
    if table is not None and "report" in table:
        once = table.drop_duplicates("report", keep="last")
        reports = once.sort_values("report").to_dict("records")
    error = str(result.error or "").strip().splitlines()
    point = {name: result.config[name] for name in POINT}
    return Trial(Path(result.path).name, point, reports, error[-1] if error else "")


def _check_resources(settings: TuneSettings, available: dict[str, float]) -> None:
    for name in ("CPU", "GPU"):
        needed, has = getattr(settings, f"{name.lower()}s_per_trial"), available.get(name, 0)
        if needed > has:
            raise UserError(f"--{name.lower()}s-per-trial {needed}: this machine has {has:g}")


@contextmanager
def _locks_in(folder: Path) -> Iterator[None]:
    """Let Ray Tune, which leaves its lock files, make them where they are removed."""
    before = os.environ.get("RAY_TMPDIR")
    os.environ["RAY_TMPDIR"] = str(folder)
    try:
        yield
    finally:
        del os.environ["RAY_TMPDIR"]
        if before is not None:
            os.environ["RAY_TMPDIR"] = before
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray Tune without its messages; it also leaves Ctrl-C switched off, which is undone."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logger, interrupt = logging.getLogger("ray.tune"), signal.getsignal(signal.SIGINT)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        signal.signal(signal.SIGINT, interrupt)
