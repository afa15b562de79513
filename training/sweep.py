"""Sweep with Ray Tune over the sizes, the batch size and the learning rate of one network.

OUT/sweep.json         written first: settings and data
OUT/trials             Ray's state of the sweep, a folder a trial
OUT/aligner            a run of `kvalign train` with the best trial's settings
OUT/trials.csv         a row for each trial, the best first
OUT/reports.csv        a row for each validation report
OUT/result.json        written last
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvalign.data_gen.store import check_model, open_store
from kvalign.foundation import progress
from kvalign.foundation.errors import RunError, UserError
from kvalign.foundation.files import locked, write_text
from kvalign.foundation.runs import ResumableRun, State, keeping
from kvalign.foundation.settings import keywords_of
from kvalign.training.aligner_folder import OVERWRITE
from kvalign.training.kinds import train_network
from kvalign.training.network_fit import LAST, RecordedRows
from kvalign.training.network_run import describe_data, recording_of
from kvalign.training.settings import NetworkSettings, TuneSettings

if TYPE_CHECKING:
    from kvalign.training.sweep_ray import Trial

_TRIALS, _ALIGNER = "trials", "aligner"
# What may differ between a sweep and its resumption.
_FREE = ("data", "model", "out", "ray_address", "overwrite")

# Read by Ray Tune: its new output, which would be printed beside ours; how often it writes down
# where the sweep is, in seconds; and that Ctrl-C is ours. Ray would end as if all were done.
# And what it would send home, and a coming change that it would warn of.
_ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@keywords_of(TuneSettings)
def tune_network(settings: TuneSettings) -> dict[str, Any]:
    """Train a network with many settings, stop bad ones early, train the best one completely.

    An interrupted sweep continues with the trials that are missing in its folder.

    Returns:
        `trials` (a row each, best first), `best` (the first), `num_stopped`, `aligner` (its
        folder), `aligner_val_loss`, and `input_label_mse`, `used` and `judged` as of
        `train_network`.

    Raises:
        NotFoundError: no recorded data.
        ExistsError: the folder has something else, and `overwrite` is not set.
        UserError: unfinished data; resources that the machine does not have.
        RunError: all trials failed.
        KeyboardInterrupt: stopped by the user; the same settings resume.
    """
    began = time.perf_counter()
    out = settings.folder.absolute()
    store = open_store(recording_of(settings))
    settings = dataclasses.replace(settings, data=store.folder)
    check_model(store)
    RecordedRows(store, settings.target, settings.min_batch_size)  # refuses what cannot be trained
    values = {name: value for name, value in settings.as_dict().items() if name not in _FREE}
    config = {"settings": values, "data": describe_data(store)}
    run = ResumableRun(out, config, config_name="sweep.json", remedy=OVERWRITE)
    state = _state(run, settings)
    if state == "finished":
        progress.say(f"{out} already has this sweep, finished: nothing to do")
        return run.result()
    base = base_settings(settings)
    with locked(out, lambda: _summary(out)), keeping(lambda: _summary(out)):
        if state == "new":
            for name in (_TRIALS, _ALIGNER):
                shutil.rmtree(out / name, ignore_errors=True)
            run.begin()
        with progress.shown_as("tune"):
            progress.phase("trials on Ray")
            progress.expect(settings.num_trials, "trials")
            trials = ranked(run_trials(out, settings, base))
        best, rows = trials[0], [trial.row for trial in trials]
        if rows[0]["state"] == "failed":
            reason = best.error or "no finite validation loss"
            raise RunError(f"all trials failed, trial {best.name} with: {reason}")
        names = ("report", "epochs", "val_loss", "seconds")
        reports = [{"trial": t.name} | {n: r[n] for n in names} for t in trials for r in t.reports]
        write_text(out / "trials.csv", pd.DataFrame(rows).to_csv(index=False))
        write_text(out / "reports.csv", pd.DataFrame(reports).to_csv(index=False))
        from kvalign.training.sweep_ray import settings_at

        best_settings = dataclasses.replace(settings_at(base, best.point), judge=True)
        (trained,) = train_network(best_settings).values()
        result: dict[str, Any] = {
            "target": settings.target,
            "best": rows[0],
            "trials": rows,
            "num_stopped": sum(row["state"] == "stopped" for row in rows),
            "aligner": str(out / _ALIGNER),
            "aligner_val_loss": trained["val_loss"],
            **{x: trained[x] for x in ("input_label_mse", "used", "judged") if x in trained},
        }
        run.finish(result)
    counts = f"{len(trials)} trials in {out}, {result['num_stopped']} stopped early"
    progress.say(f"{counts}, {time.perf_counter() - began:.0f} s")
    return result


def ranked(trials: list[Trial]) -> list[Trial]:
    """Trials by validation loss, lowest first, failed ones last."""
    losses = {t.name: math.inf if t.val_loss is None else t.val_loss for t in trials}
    return sorted(trials, key=lambda t: (t.row["state"] == "failed", losses[t.name]))


def run_trials(out: Path, settings: TuneSettings, base: NetworkSettings) -> list[Trial]:
    """Run all trials, which share `base`, or those that a killed sweep in `out` has not finished.

    Raises:
        UserError: no such Ray cluster, or a trial that this machine is too small for.
        KeyboardInterrupt: stopped by the user.
    """
    with _quiet(), _ray_session(settings.ray_address) as ray:
        from kvalign.training.sweep_ray import trial_of, tuner

        needed, has = settings.gpus_per_trial, ray.cluster_resources().get("GPU", 0)
        if settings.ray_address is None and needed > has:
            raise UserError(f"--gpus-per-trial {needed}: this machine has {has:g}")
        results = tuner(out / _TRIALS, settings, base).fit()
        return [trial_of(result, out / _TRIALS) for result in results]


@contextmanager
def _ray_session(address: str | None = None) -> Iterator[Any]:
    """The `ray` module, quiet, on the cluster at an address (else at RAY_ADDRESS, which Ray reads)
    or started on this machine, and shut down at the end. UserError if no cluster is at the address.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    import ray

    try:
        ray.init(
            address=address,
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        if address is None:
            raise
        raise UserError(f"no Ray cluster at {address!r}: {error}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _quiet() -> Iterator[None]:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logger = logging.getLogger("ray.tune")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _summary(out: Path) -> str:
    num_trials = len(list((out / _TRIALS).glob(f"*/{LAST}")))
    return f"{num_trials} trials are kept in {out / _TRIALS}" if num_trials else ""


def base_settings(settings: TuneSettings) -> NetworkSettings:
    """Training settings shared by all trials and the aligner."""
    same = ("target", "max_epochs", "vals_per_epoch", "max_steps", "seed")
    assert settings.data is not None  # resolved
    return NetworkSettings(
        data=settings.data.absolute(),
        out=settings.folder.absolute() / _ALIGNER,
        accelerator="gpu" if settings.gpus_per_trial else "cpu",
        num_threads=1,  # for the aligner too: the same sums as the trial's
        overwrite=True,
        judge=False,  # trials are compared by the error that is tuned
        **{name: getattr(settings, name) for name in same},
    )


def _state(run: ResumableRun, settings: TuneSettings) -> State:
    """Return whether the sweep is to begin, to go on, or done."""
    is_ours = run.config_path.exists()
    if settings.overwrite and (not is_ours or run.difference() or run.result()):
        return "new"
    return run.state()
