"""A training run: one network a target, then the aligner's folder, whole or not at all."""

import dataclasses
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
from kvalign.aligners.network import TARGETS
from kvalign.app.commands.train import TrainSettings
from kvalign.data_gen.store import Store, open_store
from kvalign.files import locked
from kvalign.training.aligner_folder import (
    SHARED_SIZES,
    command_line,
    config_for,
    network_sizes,
    save,
)
from kvalign.training.network_fit import best_weights, fit, losses
from kvalign.training.network_rows import InOrder, RowsOfTarget
from kvalign.training.run_folder import RunFolder, describe

_EVAL_BATCH = 8192


def train(settings: TrainSettings) -> dict[str, dict[str, Any]]:
    """Train the asked networks and save the aligner in `settings.out`.

    Returns:
        for each target what the aligner's config keeps: `val_loss` and `input_label_mse` (mean
        squared errors per number), `ratio` (first by second, lower is better), `used` (a network
        that does no better than none is saved as one that adds nothing), steps, seconds, settings,
        data; empty on devices other than the first.

    Raises:
        FileNotFoundError: no recorded data.
        FileExistsError: `out` holds a trained network or another unfinished run, and `overwrite`
            is not set.
        ValueError: unfinished data, an aligner in `out` that cannot take another network, a loss
            that is not finite.
    """
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    assert settings.data is not None  # TrainSettings sees to it
    store = open_store(settings.data, verify=True)
    targets = TARGETS if settings.target == "both" else (settings.target,)
    torch.manual_seed(settings.seed)
    aligner = _beside_trained(NetworkAligner(_config(store, settings)), settings, targets)
    rows = {
        target: RowsOfTarget(store, target, settings.batch_size, settings.seed)
        for target in targets
    }
    runs = {target: describe(settings, store, target) for target in targets}
    # The processes of other devices are started by the one that holds the lock.
    with nullcontext() if "LOCAL_RANK" in os.environ else locked(settings.out):
        return _fit(settings, aligner, rows, runs)


def _fit(
    settings: TrainSettings,
    aligner: NetworkAligner,
    rows: dict[str, RowsOfTarget],
    runs: dict[str, dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Train the networks of the targets that `rows` has, and save the aligner."""
    targets = tuple(rows)
    folders = {target: RunFolder(settings.out / "training" / target) for target in targets}
    # All before the first fit: it starts the other devices' processes, which must find them so.
    results = {
        target: folders[target].begin(runs[target], settings, aligner.config.training.get(target))
        for target in targets
    }
    for target in targets:
        net = getattr(aligner, target)
        if results[target]:
            best_weights(net, folders[target].path)
        else:
            trainer = fit(net, rows[target], settings, folders[target].path)
            if trainer.is_global_zero:
                results[target] = {
                    **_measure(net, rows[target]),
                    **_made_by(settings, trainer),
                    **runs[target],
                }
                folders[target].finish(results[target])
        if results[target] and not results[target]["used"]:
            net.clear()
    if not all(results.values()):
        return {}
    trained = {**aligner.config.training, **results}
    aligner.config = dataclasses.replace(aligner.config, training=trained)
    save(aligner, settings.out)
    return results


def _config(store: Store, settings: TrainSettings) -> AlignerConfig:
    return config_for(NetworkAligner.kind, store, store.shifts, network_sizes(settings))


def _beside_trained(
    new: NetworkAligner, settings: TrainSettings, targets: tuple[str, ...]
) -> NetworkAligner:
    """`new` with the network that `out` already holds for the target not to be trained now.

    Raises:
        FileExistsError: without `overwrite`, `out` holds a trained network of an asked target.
        ValueError: `out` holds something else, or an aligner made for another model or data.
    """
    if not (settings.out / CONFIG).exists():
        return new
    found = Aligner.from_pretrained(settings.out)
    there = found.config
    kept = [target for target in TARGETS if target in there.training and target not in targets]
    clash = [target for target in targets if target in there.training]
    if (clash or not kept) and not settings.overwrite:
        what = (
            f"a trained {' and '.join(clash)} network"
            if clash
            else f"another aligner, of kind {there.kind}"
        )
        raise FileExistsError(
            f"{settings.out} already holds {what}: give --overwrite or another --out"
        )
    if not kept:
        # The old results still tell `RunFolder.begin` which run is already in the aligner.
        new.config = dataclasses.replace(new.config, training=there.training)
        return new
    fields = (
        "kind",
        "family",
        "num_layers",
        "num_kv_heads",
        "head_dim",
        "probe",
        "chunk_len",
        "num_sinks",
        "shifts",
    )
    pairs = [(name, getattr(there, name), getattr(new.config, name)) for name in fields]
    pairs += [(name, there.sizes.get(name), new.config.sizes[name]) for name in SHARED_SIZES]
    for name, expected, here in pairs:
        if expected != here:
            shown = "another" if name == "probe" else f"{expected}, here {here}"
            raise ValueError(
                f"{settings.out} holds a {kept[0]} network made for {there.base_model}: "
                f"{name} is {shown}; name another --out"
            )
    hidden = {
        name: size for name, size in there.sizes.items() if name.startswith(f"{kept[0]}_hidden")
    }
    sizes = {**new.config.sizes, **hidden}
    merged = NetworkAligner(dataclasses.replace(new.config, sizes=sizes, training=there.training))
    setattr(merged, kept[0], getattr(found, kept[0]))
    setattr(merged, targets[0], getattr(new, targets[0]))
    return merged


def _measure(net: RealignNet, rows: RowsOfTarget) -> dict[str, Any]:
    val_loss, unchanged = losses(net, InOrder(rows.shards["val"], rows.target, _EVAL_BATCH))
    if not math.isfinite(val_loss):
        raise ValueError(
            f"the {rows.target} network diverged (val loss {val_loss}): lower --lr and give "
            "--overwrite"
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
