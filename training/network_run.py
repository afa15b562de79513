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
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities import rank_zero_only

from kvalign.aligners import Aligner, AlignerConfig, NetworkAligner, RealignNet
from kvalign.aligners.config import CONFIG
from kvalign.aligners.network_sizes import NETWORK_SIZES, SHARED_SIZES, TARGETS
from kvalign.data_gen.corpora import hub_datasets
from kvalign.data_gen.store import Store, check_model, newest_recording, open_store
from kvalign.foundation import progress
from kvalign.foundation.errors import ExistsError, UserError
from kvalign.foundation.files import locked, read_checked, sha256
from kvalign.foundation.folders import MANIFEST
from kvalign.foundation.runs import ResumableRun, keeping
from kvalign.foundation.settings import DEFAULT_MODEL
from kvalign.training.aligner_folder import IDENTITY, OVERWRITE, new_aligner, record_of, save
from kvalign.training.kinds.network import NetworkSettings
from kvalign.training.network_devices import is_helper
from kvalign.training.network_fit import BEST, LAST, best_weights, fit, losses, planned_rows
from kvalign.training.network_rows import InOrder, RecordedRows

_EVAL_BATCH = 8192
# What may differ between a run and its resumption.
_FREE = (
    "data",
    "model",
    "out",
    "target",
    "accelerator",
    "num_threads",
    "resume",
    "overwrite",
    "judge",
)
_JUDGED = ("judged", "judged_by", "val_nll")  # what streams say of all networks of an aligner
_OF_MODEL = ("family", "num_layers", "num_kv_heads", "head_dim")


def train(settings: NetworkSettings) -> dict[str, dict[str, Any]]:
    """Train a network, as `kvalign.training.train_network` does."""
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    out = settings.folder(NetworkAligner.kind)
    data = settings.data or newest_recording(settings.model or DEFAULT_MODEL)
    if settings.data is None:
        progress.say(f"recording: {data}")
        settings = dataclasses.replace(settings, data=data)
    progress.phase("checking the recording")
    store = open_store(data, verify=True)
    if settings.model not in (None, recorded := store.config.model.name):
        raise UserError(f"--model is {settings.model}, but {data} was recorded with {recorded}")
    check_model(store)
    runs = {kv: _run(settings, store, kv, out) for kv in settings.kvs}
    has_aligner = (out / CONFIG).exists()
    trained = networks_in(out) if has_aligner else {}
    done = {}
    if settings.resume and not settings.overwrite:
        done = {kv: trained[kv] for kv, run in runs.items() if _is_of(run, trained.get(kv))}
        if not settings.judge:  # what was judged is not what was trained
            done = {kv: one for kv, one in done.items() if "judged" not in one}
        runs = {kv: run for kv, run in runs.items() if kv not in done}
    if not runs:
        progress.say(f"{out} already has this, finished: nothing to do")
        return done
    torch.manual_seed(settings.seed)
    aligner = new_aligner(NetworkAligner, config_for(store, settings))
    if has_aligner:
        _join_other(aligner, settings, [*runs], out)
        others = {kv: one for kv, one in trained.items() if kv not in runs}
        trained |= _unjudged(aligner, others, out)
    rows = {kv: RecordedRows(store, kv, settings.batch_size, settings.seed) for kv in runs}
    lock = nullcontext() if is_helper() else locked(out, lambda: _summary(runs))
    with lock, keeping(lambda: _summary(runs) if settings.resume else ""):
        # All before the first fit: it starts the other devices' processes, which must find them so.
        results = {kv: _begin(run, settings, trained.get(kv)) for kv, run in runs.items()}
        plans = {kv: planned_rows(rows[kv], settings) for kv in runs if not results[kv]}
        progress.expect(sum(plans.values()), "rows")
        for kv, run in runs.items():
            net = getattr(aligner, kv)
            if results[kv]:
                best_weights(net, run.folder)
            else:
                progress.phase(f"{kv} network")
                trainer = fit(net, rows[kv], settings, run.folder)
                if trainer.is_global_zero:
                    results[kv] = _result(settings, run, trainer, net, rows[kv])
                    run.finish(results[kv])
            if results[kv] and not results[kv]["used"]:
                net.clear()
        if not all(results.values()):
            return {}
        training = _without(_JUDGED, trained) | results
        aligner.config = aligner.config.model_copy(update={"training": training})
        save(aligner, out)
    return {kv: {**done, **results}[kv] for kv in settings.kvs}


def networks_in(out: Path) -> dict[str, dict[str, Any]]:
    """The record of the networks in an aligner's folder, by `key` and `value`."""
    return read_checked(AlignerConfig, out / CONFIG).training


def config_for(store: Store, settings: NetworkSettings) -> AlignerConfig:
    """Config of networks for the model and the recorded caches."""
    model = store.config.model
    return AlignerConfig(
        kind=NetworkAligner.kind,
        base_model=model.name,
        **{name: getattr(model, name) for name in _OF_MODEL},
        embedding_fingerprint=store.config.embedding_fingerprint,
        **store.config.settings.model_dump(include={"chunk_len", "num_sinks"}),
        shifts=store.shifts[:1],  # larger ones are several of the smallest
        sizes={name: getattr(settings, name) for name in NETWORK_SIZES},
    )


def describe_data(store: Store) -> dict[str, Any]:
    """Return the fields of a recording for an aligner's config and card."""
    names = {"corpus", "num_tokens", "chunk_len", "num_sinks", "num_evicted"}
    identity = store.config.identity
    return {
        "model": store.config.model.name,
        **({IDENTITY: identity} if identity else {}),
        **store.config.settings.model_dump(include=names),
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
    """Return what interrupted runs have."""
    parts = []
    for kv, run in runs.items():
        if run.result():
            parts.append(f"the {kv} network is trained")
        elif (run.folder / LAST).exists():
            parts.append(f"the {kv} network is kept as of its last validation")
    folder = next(iter(runs.values())).folder.parent
    return f"{' and '.join(parts)} in {folder}" if parts else ""


def _is_of(run: ResumableRun, trained: dict[str, Any] | None) -> bool:
    """Return whether a network of the saved aligner is from this very run."""
    return bool(trained) and _are_one(run.result(), trained) and not run.difference()


def _are_one(result: dict[str, Any], trained: dict[str, Any] | None) -> bool:
    """Return whether two results are of one run: what streams say of it comes later."""
    of_run = [_without((*_JUDGED, "used"), {"": one or {}}) for one in (result, trained)]
    return of_run[0] == of_run[1]


def _without(names: tuple[str, ...], results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {kv: {n: x for n, x in one.items() if n not in names} for kv, one in results.items()}


def _begin(
    run: ResumableRun, settings: NetworkSettings, trained: dict[str, Any] | None
) -> dict[str, Any]:
    """Make a run's folder ready: new, or as an unfinished run of the same settings left it.

    The result of a run that was finished but is not in the aligner yet, else nothing; `trained` is
    that of the run that the saved aligner's network is from, if any.
    """
    exists, result = run.config_path.exists(), run.result()
    is_new = not result or not _are_one(result, trained)
    if exists and settings.resume and not run.difference() and is_new:
        return result
    if not settings.overwrite and not (exists and (result or not settings.resume)):
        run.state()  # refuses what is not ours to replace
    if rank_zero_only.rank == 0:
        shutil.rmtree(run.folder, ignore_errors=True)
        run.begin()
    return {}


def _join_other(new: NetworkAligner, settings: NetworkSettings, kvs: list[str], out: Path) -> None:
    """Put the network that `out` already holds for the other kv into `new`, in which `kvs` are to
    be trained.
    """
    saved = Aligner.from_pretrained(out)
    config = saved.config
    others = [kv for kv in TARGETS if kv in config.training and kv not in kvs]
    clash = [kv for kv in kvs if kv in config.training]
    if (clash or not others) and not settings.overwrite:
        what = f"another aligner, of kind {config.kind}"
        if clash:
            what = f"a trained {' and '.join(clash)} network"
        raise ExistsError(f"{out} already holds {what}: {OVERWRITE}")
    if not others:
        return
    (other,) = others
    expected, here = _shared(config), _shared(new.config)
    for name in expected:
        if expected[name] != here[name]:
            is_print = name == "embedding_fingerprint"
            values = "another" if is_print else f"{expected[name]}, here {here[name]}"
            raise UserError(
                f"{out} holds a {other} network made for {config.base_model}: "
                f"{name} is {values}; name another --out"
            )
    hidden = {name: size for name, size in config.sizes.items() if name.startswith(f"{other}_")}
    new.config = new.config.model_copy(update={"sizes": {**new.config.sizes, **hidden}})
    setattr(new, other, getattr(saved, other))


def _unjudged(
    new: NetworkAligner, trained: dict[str, dict[str, Any]], out: Path
) -> dict[str, dict[str, Any]]:
    """Records of networks that streams left out, as they were before: with a new partner, they are
    judged again. Their weights are put into `new` from their runs; without those they stay out.
    """
    before = {}
    for kv, one in trained.items():
        run = ResumableRun(out / "training" / kv, {})
        is_left_out = "judged" in one and not one["used"]
        if is_left_out and _are_one(run.result(), one) and (run.folder / BEST).exists():
            before[kv] = run.result()
            if before[kv]["used"]:
                best_weights(getattr(new, kv), run.folder)
    return before


def _shared(config: AlignerConfig) -> dict[str, Any]:
    """Return what the networks of an aligner have in common."""
    sizes = {name: config.sizes.get(name) for name in SHARED_SIZES}
    return config.model_dump(exclude={"base_model", "sizes", "training"}) | sizes


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
        "used": val_loss < unchanged or not settings.judge,
        "objective": "rollout" if len(data["num_evicted"]) > 1 else "mse",
        "seconds": round(timer.time_elapsed(), 3),  # over all sittings
        "num_steps": trainer.global_step,
        "settings": run.config["settings"],
        **record_of("train --aligner-kind network", settings, data, device, packages),
    }
