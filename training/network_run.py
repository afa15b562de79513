"""Training of the paper's networks: a resumable run for keys, one for values, then the aligner's
folder, complete or absent.

    OUT/training/KV/run.json              written first: settings and data
    OUT/training/KV/best.ckpt, last.ckpt  Lightning's checkpoints
    OUT/training/KV/csv, tensorboard      losses by step
    OUT/training/KV/result.json           written last
"""

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Timer

from kvalign.aligners import AlignerConfig, NetworkAligner, RealignNet
from kvalign.aligners.base import CONFIG, OF_MODEL
from kvalign.aligners.kinds import NETWORK_SIZES, SHARED_SIZES, TARGETS
from kvalign.aligners.network import new_net
from kvalign.data_gen.corpora import hub_datasets
from kvalign.data_gen.store import Store, check_model, newest_recording, open_store
from kvalign.foundation import progress
from kvalign.foundation.errors import ExistsError, UserError
from kvalign.foundation.files import locked, read_checked, read_json, sha256
from kvalign.foundation.folders import MANIFEST
from kvalign.foundation.runs import ResumableRun, keeping
from kvalign.foundation.settings import DEFAULT_MODEL
from kvalign.training.aligner_folder import IDENTITY, OVERWRITE, new_aligner, record_of, save
from kvalign.training.judge import judge_networks
from kvalign.training.network_fit import (
    LAST,
    InOrder,
    RecordedRows,
    best_weights,
    fit,
    losses,
    planned_rows,
)
from kvalign.training.settings import NetworkSettings, TuneSettings

_EVAL_BATCH = 8192
# What may differ between a run and its resumption.
_FREE = ("data", "model", "out", "target", "accelerator", "num_threads", "overwrite", "judge")


def train_judge_save(settings: NetworkSettings) -> dict[str, dict[str, Any]]:
    out = settings.folder
    with progress.shown_as("train"):
        aligner = train(settings)
    if aligner is not None:
        with locked(out), keeping(lambda: f"trained networks are kept in {out / 'training'}"):
            if settings.judge:
                judge_networks(aligner, settings.accelerator)
            if networks_in(out) != aligner.config.training:
                save(aligner, out)
    records = networks_in(out)
    return {kv: records[kv] for kv in settings.kvs}


def train(settings: NetworkSettings) -> NetworkAligner | None:
    """Train the networks that are not trained yet.

    Returns:
        an aligner with all networks of the folder, to be judged and saved; None if the saved one is
        the one that is asked for.
    """
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    out = settings.folder
    progress.phase("checking the recording")
    store = open_store(recording_of(settings), verify=True)
    if settings.model not in (None, recorded := store.config.model.name):
        raise UserError(
            f"--model is {settings.model}, but {store.folder} was recorded with {recorded}"
        )
    settings = dataclasses.replace(settings, data=store.folder)
    check_model(store)
    runs = {kv: _run(settings, store, kv, out) for kv in settings.kvs}
    partner = _partner(runs, out)
    records = networks_in(out)
    done = [kv for kv, run in runs.items() if _is_of(run, records.get(kv, {}), settings)]
    if records and not settings.overwrite:
        if lost := [kv for kv in records if kv not in (*done, *partner)]:
            what = f"a trained {' and '.join(lost)} aligner"
            raise ExistsError(f"{out} already holds {what}: {OVERWRITE}")
        if done == [*runs]:
            progress.say(f"{out} already has this, finished: nothing to do")
            unjudged = [part for part in records.values() if part["used"] and "judged" not in part]
            if not (settings.judge and unjudged):
                return None
    torch.manual_seed(settings.seed)
    aligner = new_aligner(NetworkAligner, config_for(store, settings))
    rows = {kv: RecordedRows(store, kv, settings.batch_size, settings.seed) for kv in runs}
    with locked(out, lambda: _summary(runs)), keeping(lambda: _summary(runs)):
        for kv, run in runs.items():
            _begin(run, settings, kv in done)
        left = [kv for kv, run in runs.items() if not run.result()]
        progress.expect(sum(planned_rows(rows[kv], settings) for kv in left), "rows")
        for kv in left:
            progress.phase(f"{kv} network")
            net, run = getattr(aligner, kv), runs[kv]
            trainer = fit(net, rows[kv], settings, run.folder)
            run.finish(_result(settings, run, trainer, net, rows[kv]))
    return _of_runs(aligner, {**runs, **partner}, settings)


def _of_runs(
    aligner: NetworkAligner, runs: dict[str, ResumableRun], settings: NetworkSettings
) -> NetworkAligner:
    """The aligner with the weights and results of finished runs, by kv. A network that does no
    better than none is cleared, unless all are to be kept.
    """
    config, records = aligner.config, {}
    for kv in filter(runs.__contains__, TARGETS):
        run, result = runs[kv], runs[kv].result()
        sizes = {
            name: size for name, size in run.config["settings"].items() if name in config.sizes
        }
        config = config.model_copy(update={"sizes": config.sizes | sizes})
        if kv not in settings.kvs:
            setattr(aligner, kv, new_net(config, kv, config.num_positions))
        best_weights(getattr(aligner, kv), run.folder)
        records[kv] = result | {"used": result["used"] or not settings.judge}
        if not records[kv]["used"]:
            getattr(aligner, kv).clear()
    aligner.config = config.model_copy(update={"training": records})
    return aligner


def recording_of(settings: NetworkSettings | TuneSettings) -> Path:
    """Folder of the recording that is named, or the newest of the model, with a line on it."""
    if settings.data is not None:
        return settings.data
    folder = newest_recording(settings.model or DEFAULT_MODEL)
    progress.say(f"recording: {folder}")
    return folder


def networks_in(out: Path) -> dict[str, dict[str, Any]]:
    """Records of the networks in an aligner's folder, by kv; none if there is no aligner."""
    return read_checked(AlignerConfig, out / CONFIG).training if (out / CONFIG).exists() else {}


def config_for(store: Store, settings: NetworkSettings) -> AlignerConfig:
    model = store.config.model
    return AlignerConfig(
        kind=NetworkAligner.kind,
        base_model=model.name,
        **{name: getattr(model, name) for name in OF_MODEL},
        embedding_fingerprint=store.config.embedding_fingerprint,
        chunk_len=store.config.settings.chunk_len,
        num_sinks=store.config.settings.num_sinks,
        shifts=store.shifts[:1],  # larger ones are several of the smallest
        sizes={name: getattr(settings, name) for name in NETWORK_SIZES},
    )


def describe_data(store: Store) -> dict[str, Any]:
    """Return the fields of a recording for an aligner's config and card."""
    names = ("corpus", "num_tokens", "chunk_len", "num_sinks", "num_evicted")
    return {
        "model": store.config.model.name,
        IDENTITY: store.config.identity,
        **{name: getattr(store.config.settings, name) for name in names},
        "num_rows": store.manifest.num_rows,
        "manifest_sha256": sha256(store.folder / MANIFEST),
        "datasets": hub_datasets(store.config.settings.corpus),
        "text_sha256": store.manifest.text_sha256,
    }


def _run(settings: NetworkSettings, store: Store, kv: str, out: Path) -> ResumableRun:
    """The run of one kv, by what it depends on, which its aligner's config and card say, too."""
    other = TARGETS[1 - TARGETS.index(kv)]
    values = {
        name: value
        for name, value in settings.as_dict().items()
        if name not in _FREE and not name.startswith(f"{other}_")
    }
    config = {"settings": values, "data": describe_data(store)}
    return ResumableRun(out / "training" / kv, config, remedy=OVERWRITE)


def _summary(runs: dict[str, ResumableRun]) -> str:
    kept = [kv for kv, run in runs.items() if (run.folder / LAST).exists()]
    folder = next(iter(runs.values())).folder.parent
    what = f"networks for {' and '.join(kept)}"
    return f"{what} are kept as of their last validation in {folder}" if kept else ""


def _is_of(run: ResumableRun, record: dict[str, Any], settings: NetworkSettings) -> bool:
    """Return whether a saved network is the one of a run; what was judged is not all that was
    trained.
    """
    is_same = all(record.get(name) == value for name, value in run.config.items())
    return is_same and (settings.judge or "judged" not in record)


def _begin(run: ResumableRun, settings: NetworkSettings, is_saved: bool) -> None:
    """Make a run's folder ready: new, or as a run of the same settings left it. What is saved is
    trained again only if it is to be overwritten.
    """
    result, is_redone = run.result(), is_saved and settings.overwrite
    is_same = run.config_path.exists() and not run.difference()
    if is_same and not (result and is_redone):
        return
    if not settings.overwrite and not result:
        run.state()  # refuses what is not ours to replace
    shutil.rmtree(run.folder, ignore_errors=True)
    run.begin()


def _partner(runs: dict[str, ResumableRun], out: Path) -> dict[str, ResumableRun]:
    """The finished run of the other kv in the folder, which joins the aligner, if there is one;
    UserError if it is for another model or of other sizes.
    """
    ours, partner = next(iter(runs.values())), {}
    for kv in TARGETS:
        run = ResumableRun(out / "training" / kv, {})
        if kv in runs or not run.result():
            continue
        run.config = read_json(run.config_path)
        expected, here = _shared(run.config), _shared(ours.config)
        for name, value in expected.items():
            if here.get(name, value) != value:
                raise UserError(
                    f"{out} holds a {kv} network made for {expected['model']}: {name} is {value}, "
                    f"here {here[name]}; name another --out"
                )
        partner[kv] = run
    return partner


def _shared(config: dict[str, Any]) -> dict[str, Any]:
    """Return what the networks of an aligner have in common."""
    data, sizes = config["data"], {name: config["settings"][name] for name in SHARED_SIZES}
    same = {name: data[name] for name in ("model", IDENTITY, "chunk_len", "num_sinks")}
    return {**same, "num_evicted": min(data["num_evicted"]), **sizes}


def _result(
    settings: NetworkSettings,
    run: ResumableRun,
    trainer: pl.Trainer,
    net: RealignNet,
    rows: RecordedRows,
) -> dict[str, Any]:
    """Return the result of a network: errors on the validation rows, and how it was trained."""
    val_loss, unchanged = losses(net, InOrder(rows.shards["val"], rows.kv, _EVAL_BATCH))
    if not math.isfinite(val_loss):
        raise UserError(
            f"the {rows.kv} network diverged (val loss {val_loss}): lower --lr and give --overwrite"
        )
    (timer,) = (callback for callback in trainer.callbacks if isinstance(callback, Timer))
    data, device = run.config["data"], trainer.strategy.root_device
    packages = ("kvalign", "torch", "lightning")
    return {
        "val_loss": val_loss,
        "input_label_mse": unchanged,
        "ratio": val_loss / unchanged if unchanged else None,
        "used": val_loss < unchanged,
        "objective": "rollout" if len(data["num_evicted"]) > 1 else "mse",
        "seconds": round(timer.time_elapsed(), 3),  # over all sittings
        "num_steps": trainer.global_step,
        "settings": run.config["settings"],
        **record_of("train", settings, data, device, packages),
    }
