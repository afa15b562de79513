"""Trials of a sweep in Ray Tune: drawn at random, stopped early by ASHA, resumed after a kill.

ASHA is Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning". A killed trial
continues from Lightning's `last.ckpt` in its folder. Ray keeps no checkpoint. Reports that it may
have missed are in that file, too, and are sent again.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Timer
from ray import tune
from ray.tune.experiment import Trial as RayTrial
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import BasicVariantGenerator

from kvalign.aligners import NetworkAligner
from kvalign.data_gen.store import open_store
from kvalign.foundation import progress
from kvalign.training.network_fit import LAST, RecordedRows, fit
from kvalign.training.network_run import config_for
from kvalign.training.settings import NetworkSettings, TuneSettings

HIDDEN = ("hidden1", "hidden2")
POINT = (*HIDDEN, "batch_size", "lr")
# Which report it would be, had an epoch exactly as many as asked: large batches are few, so an
# epoch of them has some more reports, and equal numbers are not equal amounts of data.
PLACE = "place"
LEARNING_RATES = 1e-4, 1e-1


@dataclass(frozen=True)
class Trial:
    name: str
    point: Mapping[str, Any]  # by the names of `POINT`
    reports: list[dict[str, Any]]  # of `Reports`, in order, each once
    error: str = ""  # one line, of a failed trial

    @property
    def val_loss(self) -> float | None:
        """Lowest validation loss; None if none is finite."""
        finite = [r["val_loss"] for r in self.reports if math.isfinite(r["val_loss"])]
        return min(finite, default=None)

    @property
    def row(self) -> dict[str, Any]:
        """Row of tables. The state is `finished` (early stopping included), `stopped` by the
        scheduler, or `failed`.
        """
        last = self.reports[-1] if self.reports else {}
        state = "finished" if last.get("is_last") else "stopped"
        return {
            "trial": self.name,
            **self.point,
            "num_reports": len(self.reports),
            "state": "failed" if self.error or self.val_loss is None else state,
            "val_loss": self.val_loss,
            **{name: last.get(name) for name in ("num_parameters", "seconds")},
        }


def settings_at(base: NetworkSettings, point: Mapping[str, Any]) -> NetworkSettings:
    """Training settings at a point of the search space, the rest as in `base`."""
    sizes = {f"{base.target}_{name}": point[name] for name in HIDDEN}
    return dataclasses.replace(base, batch_size=point["batch_size"], lr=point["lr"], **sizes)


def tuner(folder: Path, settings: TuneSettings, base: NetworkSettings) -> tune.Tuner:
    """All trials, which share `base`, or those that a killed sweep has not finished in a folder."""
    trainable = tune.with_resources(
        tune.with_parameters(run_trial, base=base, folder=folder),
        {"cpu": 1, "gpu": settings.gpus_per_trial},
    )
    if list(folder.glob("experiment_state-*.json")):
        return tune.Tuner.restore(str(folder), trainable, restart_errored=True)
    space = {
        **{name: tune.choice(list(settings.hidden_sizes)) for name in HIDDEN},
        "batch_size": tune.choice(list(settings.batch_sizes)),
        "lr": tune.loguniform(*LEARNING_RATES),
    }
    config = tune.TuneConfig(
        metric="val_loss",
        mode="min",
        num_samples=settings.num_trials,
        scheduler=scheduler(settings),
        search_alg=BasicVariantGenerator(
            max_concurrent=settings.num_concurrent or 0, random_state=settings.seed
        ),
        trial_name_creator=_name,
        trial_dirname_creator=_name,
    )
    place = dict(name=folder.name, storage_path=str(folder.parent))
    run = tune.RunConfig(**place, callbacks=[TrialWatch()], verbose=0)
    return tune.Tuner(trainable, param_space=space, tune_config=config, run_config=run)


def scheduler(settings: TuneSettings) -> ASHAScheduler:
    """Scheduler that stops trials, comparing them at the same amount of data."""
    return ASHAScheduler(
        time_attr=PLACE,
        # Beyond the last report: at `max_t` itself every trial would be stopped.
        max_t=settings.max_epochs * settings.vals_per_epoch + 1,
        grace_period=settings.grace_reports,
        reduction_factor=settings.reduction_factor,
    )


def trial_of(result: tune.Result, folder: Path) -> Trial:
    """A trial, with its reports as they are in its own checkpoint. What Ray has of them is not in
    the folder of a sweep that was moved.
    """
    name = Path(result.path).name
    checkpoint = folder / name / LAST
    config = result.config or {}  # of none before its first report
    reports = []
    if config and checkpoint.exists():
        states = torch.load(checkpoint, map_location="cpu", weights_only=True)["callbacks"]
        reports = states[Reports.__name__]["reports"]
    error = str(result.error or "").strip().splitlines()
    point = {name: config.get(name) for name in POINT}
    return Trial(name, point, reports, error[-1] if error else "")


def _name(trial: RayTrial) -> str:
    return f"{int(trial.trial_id.rpartition('_')[2]):03d}"


class TrialWatch(tune.Callback):
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
    last = trial.last_result or {}
    reached = f" after report {last['report']} of {last['max_reports']}" if "report" in last else ""
    measured = "no val loss"
    if (lowest := _best_loss(trial)) < math.inf:
        measured = f"val loss {lowest:.4g} (best so far {min(map(_best_loss, trials)):.4g})"
    return f"trial {trial} {state}{reached}: {measured}"


def _best_loss(trial: RayTrial) -> float:
    lowest = trial.metric_analysis.get("val_loss", {}).get("min", math.inf)
    return lowest if math.isfinite(lowest) else math.inf


def run_trial(point: dict[str, Any], base: NetworkSettings, folder: Path) -> None:
    """Train in `folder / trial's name`, in a process of Ray; all paths absolute."""
    torch.set_num_threads(base.num_threads)
    reports = Reports(tune.report, base.vals_per_epoch)
    train_trial(settings_at(base, point), folder / tune.get_context().get_trial_name(), reports)


def train_trial(settings: NetworkSettings, work_dir: Path, reports: "Reports") -> None:
    """Train one network from the initial weights of `train_network`."""
    assert settings.data is not None  # a sweep names it
    store = open_store(settings.data)
    torch.manual_seed(settings.seed)
    net = getattr(NetworkAligner(config_for(store, settings)), settings.target)
    rows = RecordedRows(store, settings.target, settings.batch_size, settings.seed)
    fit(net, rows, settings, work_dir, callbacks=[reports])
    reports.send_rest()


class Reports(pl.Callback):
    """A trial's validation reports, saved in its checkpoints.

    Each is sent when the next step begins. By then it is in `last.ckpt`, which Lightning writes
    after this callback's `on_validation_end`. Sending may end the process.
    """

    def __init__(self, send: Callable[[dict[str, Any]], object], vals_per_epoch: int):
        self.send, self.vals_per_epoch = send, vals_per_epoch
        self.reports: list[dict[str, Any]] = []
        self.num_sent = 0

    def state_dict(self) -> dict[str, Any]:
        return {"reports": self.reports}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.reports = state_dict["reports"]

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        num_batches, every = trainer.num_training_batches, trainer.val_check_batch
        num_epochs, rest = divmod(int(trainer.estimated_stepping_batches), num_batches)
        max_reports = num_epochs * (num_batches // every) + rest // every
        number, epochs = len(self.reports) + 1, trainer.global_step / num_batches
        (timer,) = (c for c in trainer.callbacks if isinstance(c, Timer))
        self.reports.append(
            {
                "report": number,
                "max_reports": max_reports,
                "epochs": epochs,
                PLACE: max(1, round(epochs * self.vals_per_epoch)),
                "val_loss": trainer.callback_metrics["val_loss"].item(),
                "num_parameters": sum(p.numel() for p in module.parameters()),
                "seconds": round(timer.time_elapsed(), 3),  # over all sittings
                "is_last": bool(trainer.should_stop or number == max_reports),
            }
        )

    def send_rest(self, *_: Any) -> None:
        for report in self.reports[self.num_sent :]:
            self.num_sent += 1
            self.send(report)

    on_train_batch_start = send_rest
