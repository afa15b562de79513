"""A training run: one network a kv, then the aligner's folder, whole or not at all."""

import math
import os
import platform
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Timer

from kvalign.aligners import Aligner, AlignerConfig, NetworkAligner, RealignNet
from kvalign.aligners.base import CONFIG
from kvalign.aligners.network_sizes import KV
from kvalign.data_gen.store import Store, open_store
from kvalign.errors import ExistsError, UserError
from kvalign.files import locked
from kvalign.training.aligner_folder import (
    SHARED_SIZES,
    command_line,
    config_for,
    network_sizes,
    save,
)
from kvalign.training.network_fit import best_weights, fit, losses
from kvalign.training.network_rows import InOrder, RecordedRows
from kvalign.training.run_folder import RunFolder, describe
from kvalign.training.settings import TrainSettings

_EVAL_BATCH = 8192


def train(settings: TrainSettings) -> dict[str, dict[str, Any]]:
    """Train the asked networks and save the aligner in `settings.out`.

    Returns:
        for each kv what the aligner's config keeps: `val_loss` and `input_label_mse` (mean
        squared errors per number), `ratio` (first by second, lower is better), `used` (a network
        that does no better than none is saved as one that adds nothing), steps, seconds, settings,
        data; empty on devices other than the first.

    Raises:
        NotFoundError: no recorded data.
        ExistsError: `out` holds a trained network or another unfinished run, and `overwrite`
            is not set.
        UserError: unfinished data, an aligner in `out` that cannot take another network, a loss
            that is not finite.
    """
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    assert settings.data is not None  # TrainSettings sees to it
    store = open_store(settings.data, verify=True)
    targets = KV if settings.target == "both" else (settings.target,)
    torch.manual_seed(settings.seed)
    aligner = _beside_trained(NetworkAligner(_config(store, settings)), settings, targets)
    rows = {kv: RecordedRows(store, kv, settings.batch_size, settings.seed) for kv in targets}
    runs = {kv: describe(settings, store, kv) for kv in targets}
    # The processes of other devices are started by the one that holds the lock.
    with nullcontext() if "LOCAL_RANK" in os.environ else locked(settings.out):
        return _fit(settings, aligner, rows, runs)


def _fit(
    settings: TrainSettings,
    aligner: NetworkAligner,
    rows: dict[str, RecordedRows],
    runs: dict[str, dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Train the networks of the targets that `rows` has, and save the aligner."""
    targets = tuple(rows)
    folders = {kv: RunFolder(settings.out / "training" / kv) for kv in targets}
    # All before the first fit: it starts the other devices' processes, which must find them so.
    results = {
        kv: folders[kv].begin(runs[kv], settings, aligner.config.training.get(kv)) for kv in targets
    }
    for kv in targets:
        net = getattr(aligner, kv)
        if results[kv]:
            best_weights(net, folders[kv].path)
        else:
            trainer = fit(net, rows[kv], settings, folders[kv].path)
            if trainer.is_global_zero:
                results[kv] = {
                    **_measure(net, rows[kv]),
                    **_made_by(settings, trainer),
                    **runs[kv],
                }
                folders[kv].finish(results[kv])
        if results[kv] and not results[kv]["used"]:
            net.clear()
    if not all(results.values()):
        return {}
    trained = {**aligner.config.training, **results}
    aligner.config = aligner.config.model_copy(update={"training": trained})
    save(aligner, settings.out)
    return results


def _config(store: Store, settings: TrainSettings) -> AlignerConfig:
    return config_for(NetworkAligner.kind, store, store.shifts, network_sizes(settings))


def _beside_trained(
    new: NetworkAligner, settings: TrainSettings, targets: tuple[str, ...]
) -> NetworkAligner:
    """`new` with the network that `out` already holds for the kv not to be trained now.

    Raises:
        ExistsError: without `overwrite`, `out` holds a trained network of an asked kv.
        UserError: `out` holds something else, or an aligner made for another model or data.
    """
    if not (settings.out / CONFIG).exists():
        return new
    found = Aligner.from_pretrained(settings.out)
    there = found.config
    kept = [kv for kv in KV if kv in there.training and kv not in targets]
    clash = [kv for kv in targets if kv in there.training]
    if (clash or not kept) and not settings.overwrite:
        what = (
            f"a trained {' and '.join(clash)} network"
            if clash
            else f"another aligner, of kind {there.kind}"
        )
        raise ExistsError(f"{settings.out} already holds {what}: give --overwrite or another --out")
    if not kept:
        # The old results still tell `RunFolder.begin` which run is already in the aligner.
        new.config = new.config.model_copy(update={"training": there.training})
        return new
    fields = (
        "kind",
        "family",
        "num_layers",
        "num_kv_heads",
        "head_dim",
        "embedding_fingerprint",
        "chunk_len",
        "num_sinks",
        "shifts",
    )
    pairs = [(name, getattr(there, name), getattr(new.config, name)) for name in fields]
    pairs += [(name, there.sizes.get(name), new.config.sizes[name]) for name in SHARED_SIZES]
    for name, expected, here in pairs:
        if expected != here:
            shown = "another" if name == "embedding_fingerprint" else f"{expected}, here {here}"
            raise UserError(
                f"{settings.out} holds a {kept[0]} network made for {there.base_model}: "
                f"{name} is {shown}; name another --out"
            )
    hidden = {
        name: size for name, size in there.sizes.items() if name.startswith(f"{kept[0]}_hidden")
    }
    sizes = {**new.config.sizes, **hidden}
    merged = NetworkAligner(
        new.config.model_copy(update={"sizes": sizes, "training": there.training})
    )
    setattr(merged, kept[0], getattr(found, kept[0]))
    setattr(merged, targets[0], getattr(new, targets[0]))
    return merged


def _measure(net: RealignNet, rows: RecordedRows) -> dict[str, Any]:
    val_loss, unchanged = losses(net, InOrder(rows.shards["val"], rows.kv, _EVAL_BATCH))
    if not math.isfinite(val_loss):
        raise UserError(
            f"the {rows.kv} network diverged (val loss {val_loss}): lower --lr and give --overwrite"
        )
    return {
        "val_loss": val_loss,
        "input_label_mse": unchanged,
        "ratio": val_loss / unchanged if unchanged else None,
        "used": val_loss < unchanged,
    }


def _made_by(settings: TrainSettings, trainer: pl.Trainer) -> dict[str, Any]:
    device = trainer.strategy.root_device
    (timer,) = (callback for callback in trainer.callbacks if isinstance(callback, Timer))
    return {
        "seconds": round(timer.time_elapsed(), 3),  # over all sittings
        "num_steps": trainer.global_step,
        "command": command_line(settings),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.machine(),
        "num_threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("kvalign", "torch", "lightning")},
    }
