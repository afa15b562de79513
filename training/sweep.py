"""Sweep with Ray Tune over the sizes, the batch size and the learning rate of one network.

OUT/sweep.json         written first: settings and data
OUT/trials             Ray's state of the sweep, a folder a trial
OUT/aligner            a run of `kvalign train` with the best trial's settings
OUT/trials.csv, ...    tables and plots, see `sweep_report`
OUT/result.json        written last
"""

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

from kvalign.data_gen.store import check_model, newest_recording, open_store
from kvalign.foundation import progress
from kvalign.foundation.errors import RunError
from kvalign.foundation.files import locked
from kvalign.foundation.runs import ResumableRun, State, keeping
from kvalign.foundation.settings import keywords_of
from kvalign.training.aligner_folder import OVERWRITE
from kvalign.training.kinds.network import NetworkSettings, train_network
from kvalign.training.network_devices import check_runs_once
from kvalign.training.network_rows import RecordedRows
from kvalign.training.network_run import describe_data
from kvalign.training.settings import TuneSettings
from kvalign.training.sweep_ray import TRIALS, run_trials
from kvalign.training.sweep_report import ranked, write
from kvalign.training.sweep_trial import settings_at

_ALIGNER = "aligner"
# What may differ between a sweep and its resumption.
_FREE = ("data", "model", "out", "ray_address", "resume", "overwrite")


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
        UserError: unfinished data or data without rows; resources that the machine does not have.
        RunError: all trials failed.
        KeyboardInterrupt: stopped by the user; the same settings resume.
    """
    began = time.perf_counter()
    out = settings.folder.absolute()
    data = settings.data or newest_recording(settings.model)
    if settings.data is None:
        progress.say(f"recording: {data}")
        settings = dataclasses.replace(settings, data=data)
    store = open_store(data)
    check_model(store)
    RecordedRows(store, settings.target, settings.min_batch_size).num_batches(1)
    check_runs_once()
    values = {name: value for name, value in settings.as_dict().items() if name not in _FREE}
    config = {"settings": values, "data": describe_data(store)}
    run = ResumableRun(out, config, config_name="sweep.json", remedy=OVERWRITE)
    state = _state(run, settings)
    if state == "finished":
        progress.say(f"{out} already has this sweep, finished: nothing to do")
        return run.result()
    base = base_settings(settings)
    with (
        locked(out, lambda: _summary(out)),
        keeping(lambda: _summary(out) if settings.resume else ""),
    ):
        if state == "new":
            for name in (TRIALS, _ALIGNER):
                shutil.rmtree(out / name, ignore_errors=True)
            run.begin()
        with progress.shown_as("tune"):
            progress.phase("trials on Ray")
            progress.expect(settings.num_trials, "trials")
            trials = ranked(run_trials(out, settings, base))
        best = trials[0]
        if best.state == "failed":
            reason = best.error or "no finite validation loss"
            raise RunError(f"all trials failed, trial {best.name} with: {reason}")
        write(out, trials, settings.target)
        best_settings = dataclasses.replace(settings_at(base, best.point), judge=True)
        (trained,) = train_network(best_settings).values()
        result: dict[str, Any] = {
            "target": settings.target,
            "best": best.row,
            "trials": [trial.row for trial in trials],
            "num_stopped": sum(trial.state == "stopped" for trial in trials),
            "aligner": str(out / _ALIGNER),
            "aligner_val_loss": trained["val_loss"],
            **{x: trained[x] for x in ("input_label_mse", "used", "judged") if x in trained},
        }
        run.finish(result)
    counts = f"{len(trials)} trials in {out}, {result['num_stopped']} stopped early"
    progress.say(f"{counts}, {time.perf_counter() - began:.0f} s")
    return result


def _summary(out: Path) -> str:
    """Return what an interrupted sweep has."""
    num_trials = len(list((out / TRIALS).glob("*/last.ckpt")))
    return f"{num_trials} trials are kept in {out / TRIALS}" if num_trials else ""


def base_settings(settings: TuneSettings) -> NetworkSettings:
    """Training settings shared by all trials and the aligner."""
    same = ("target", "max_epochs", "vals_per_epoch", "max_steps", "seed")
    assert settings.data is not None  # resolved
    return NetworkSettings(
        data=settings.data.absolute(),
        out=settings.folder.absolute() / _ALIGNER,
        accelerator="gpu" if settings.gpus_per_trial else "cpu",
        num_threads=settings.cpus_per_trial,  # for the aligner too: the same sums as the trial's
        overwrite=True,
        judge=False,  # trials are compared by the error that is tuned
        **{name: getattr(settings, name) for name in same},
    )


def _state(run: ResumableRun, settings: TuneSettings) -> State:
    """Return whether the sweep is to begin, to go on, or done."""
    is_ours = run.config_path.exists()
    if is_ours and run.difference() and not (run.folder / TRIALS).exists():
        return "new"  # nothing is lost
    if settings.overwrite and (not is_ours or run.difference() or run.result()):
        return "new"
    state = run.state()
    return "new" if state == "unfinished" and not settings.resume else state
