"""A sweep with Ray Tune over the sizes, the batch size and the learning rate of one network.

OUT/sweep.json         written first: settings and data
OUT/trials             Ray's state of the sweep, a folder a trial
OUT/aligner            a run of `kvalign train` with the best trial's settings
OUT/trials.csv, ...    tables and plots, see `tune_report`
OUT/result.json        written last
"""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from kvalign.data_gen.store import Store, open_store
from kvalign.errors import ExistsError, RunError
from kvalign.files import LOCK, locked, read_json, write_json
from kvalign.training.aligner_folder import describe_data
from kvalign.training.network_rows import RecordedRows
from kvalign.training.network_run import train
from kvalign.training.run_folder import difference
from kvalign.training.settings import TrainSettings, TuneSettings
from kvalign.training.sweep_ray import TRIALS, run_trials
from kvalign.training.sweep_report import ranked, write
from kvalign.training.sweep_trial import settings_at

_SWEEP, _RESULT, _ALIGNER = "sweep.json", "result.json", "aligner"
# What may differ between a sweep and its resumption.
_FREE = ("data", "out", "ray_address", "resume", "overwrite")


def sweep(settings: TuneSettings) -> dict[str, Any]:
    """Run the trials that the folder does not have yet, then train the best settings whole.

    Returns:
        `trials` (a row each, best first), `best` (the first), `num_stopped`, `aligner` (its
        folder), `aligner_val_loss`, and `input_label_mse` and `used` as `align_run.train`.

    Raises:
        NotFoundError: no recorded data.
        ExistsError: the folder holds something else, and `overwrite` is not set.
        UserError: unfinished data or data without rows; resources that the machine has not.
        RunError: all trials failed.
        KeyboardInterrupt: stopped by the user; the same settings resume.
    """
    began, out = time.perf_counter(), settings.out.absolute()
    store = open_store(settings.data)
    RecordedRows(store, settings.target, settings.min_batch_size).num_batches(1)
    what = describe(settings, store)
    result = _finished(out, what, settings)
    if result:
        print(f"{out} already holds this sweep, finished: nothing to do", file=sys.stderr)
        return result
    base = base_settings(settings)
    with locked(out):
        _make_ready(out, what, settings)
        trials = ranked(run_trials(out, settings, base))
        best = trials[0]
        if best.state == "failed":
            what_failed = best.error or "no validation loss that is finite"
            raise RunError(f"all trials failed, trial {best.name} with: {what_failed}")
        write(out, trials, settings.target)
        (trained,) = train(settings_at(base, best.point)).values()
        result = {
            "target": settings.target,
            "best": best.row,
            "trials": [trial.row for trial in trials],
            "num_stopped": sum(trial.state == "stopped" for trial in trials),
            "aligner": str(out / _ALIGNER),
            "aligner_val_loss": trained["val_loss"],
            "input_label_mse": trained["input_label_mse"],
            "used": trained["used"],
        }
        write_json(out / _RESULT, result)
    print(
        f"{len(trials)} trials in {out}, {result['num_stopped']} stopped early, "
        f"{time.perf_counter() - began:.0f} s",
        file=sys.stderr,
    )
    return result


def base_settings(settings: TuneSettings) -> TrainSettings:
    """The training settings that all trials and the aligner share."""
    same = ("target", "max_epochs", "vals_per_epoch", "max_steps", "seed")
    return TrainSettings(
        data=settings.data.absolute(),
        out=settings.out.absolute() / _ALIGNER,
        accelerator="gpu" if settings.gpus_per_trial else "cpu",
        num_threads=settings.cpus_per_trial,  # for the aligner too: the same sums as the trial's
        overwrite=True,
        **{name: getattr(settings, name) for name in same},
    )


def describe(settings: TuneSettings, store: Store) -> dict[str, Any]:
    """What a sweep depends on, as JSON holds it."""
    own = {name: value for name, value in settings.as_dict().items() if name not in _FREE}
    return json.loads(json.dumps({"settings": own, "data": describe_data(store)}))


def _finished(out: Path, what: dict[str, Any], settings: TuneSettings) -> dict[str, Any]:
    """The result of this very sweep, if `out` has it.

    Raises:
        ExistsError: `out` holds something else, and `overwrite` is not set.
    """
    if settings.overwrite:
        return {}
    if not (out / _SWEEP).exists():
        if out.exists() and any(path.name != LOCK for path in out.iterdir()):
            raise ExistsError(f"{out} holds files that are no sweep: name another --out")
        return {}
    found = read_json(out / _SWEEP)
    if found != what and (out / TRIALS).exists():
        raise ExistsError(
            f"{out} holds a sweep of other settings ({difference(found, what)}): give --overwrite "
            "or another --out"
        )
    return read_json(out / _RESULT) if (out / _RESULT).exists() else {}


def _make_ready(out: Path, what: dict[str, Any], settings: TuneSettings) -> None:
    """Leave an unfinished sweep of the same settings as it is; else begin a new one."""
    found = read_json(out / _SWEEP) if (out / _SWEEP).exists() else None
    if found == what and settings.resume and not (out / _RESULT).exists():
        return
    (out / _RESULT).unlink(missing_ok=True)
    write_json(out / _SWEEP, what)
    for name in (TRIALS, _ALIGNER):
        shutil.rmtree(out / name, ignore_errors=True)
