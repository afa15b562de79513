"""A training run and its folder: what is finished, what can be resumed, what must not be overwritten.

    OUT/config.json, model.safetensors, README.md   the aligner, there once each asked target is trained
    OUT/training/TARGET/run.json                    written first: settings and data
    OUT/training/TARGET/best.ckpt, last.ckpt        of Lightning
    OUT/training/TARGET/csv/, tensorboard/          losses by step
    OUT/training/TARGET/result.json                 written last
"""

import dataclasses
import hashlib
import math
import os
import platform
import shlex
import shutil
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only

from kvalign.aligners import Aligner, AlignerConfig, NetworkAligner
from kvalign.aligners.network import TARGETS
from kvalign.commands.train import TrainSettings
from kvalign.data_gen.store import MANIFEST, Store, open_store, read_json, write_json
from kvalign.settings import flag
from kvalign.training.align import BEST, fit, losses
from kvalign.training.rows import InOrder, RowsOfTarget

RUN, RESULT = "run.json", "result.json"
_SIZES = ("position_dim", "layer_dim", "head_embed_dim")
_HIDDEN = tuple(f"{target}_hidden{i}" for target in TARGETS for i in (1, 2))
# What may differ between a run and its resumption.
_FREE = ("data", "out", "target", "accelerator", "num_threads", "resume", "overwrite", "json")


def train(settings: TrainSettings) -> dict[str, dict[str, Any]]:
    """Train the asked networks and save the aligner in `settings.out`.

    Returns:
        for each target `val_loss`, `input_label_mse`, `ratio` of the two, and what else its config keeps; nothing
        on devices other than the first.

    Raises:
        FileNotFoundError: no recorded data.
        FileExistsError: `out` holds a trained network or another unfinished run, and `overwrite` is not set.
        ValueError: unfinished data, an aligner in `out` that cannot take another network, a loss that is not finite.
    """
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    store = open_store(settings.data)
    targets = TARGETS if settings.target == "both" else (settings.target,)
    torch.manual_seed(settings.seed)
    fresh = NetworkAligner(_config(store, settings))
    aligner = _with_trained(fresh, settings, targets)
    runs = {target: _describe(settings, store, target) for target in targets}
    rows = {target: RowsOfTarget(store, target, settings.batch_size, settings.seed) for target in targets}
    # All folders before the first fit: it starts the processes of the other devices, which must find them so.
    finished = {t: _begin(_folder(settings, t), runs[t], settings, aligner.config.training.get(t)) for t in targets}
    for target in targets:
        net, folder, start = getattr(aligner, target), _folder(settings, target), time.monotonic()
        if finished[target]:
            saved = torch.load(folder / BEST, map_location="cpu", weights_only=True)["state_dict"]
            net.load_state_dict({name.removeprefix("net."): weight for name, weight in saved.items()})
            continue
        trainer = fit(net, rows[target], settings, folder)
        if not trainer.is_global_zero:
            continue
        val_loss, unchanged = losses(net, InOrder(rows[target].shards["val"], target, 8192))
        if not math.isfinite(val_loss):
            raise ValueError(f"the {target} network diverged (val loss {val_loss}): lower --lr and give --overwrite")
        finished[target] = {
            "val_loss": val_loss,
            "input_label_mse": unchanged,
            "ratio": val_loss / unchanged if unchanged else math.nan,
            "num_steps": trainer.global_step,
            "seconds": round(time.monotonic() - start, 3),
            "command": _command(settings),
            "device": platform.machine() if trainer.strategy.root_device.type == "cpu" else _gpu_name(trainer),
            "versions": {name: version(name) for name in ("kvalign", "torch", "lightning")},
            **runs[target],
        }
        write_json(folder / RESULT, finished[target])
    if rank_zero_only.rank:
        return {}
    aligner.config = dataclasses.replace(aligner.config, training={**aligner.config.training, **finished})
    _save(aligner, settings.out)
    return finished
