"""Position tables from recorded caches: the mean key and value at each position, in one pass."""

import logging
import platform
import time
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from kvalign.aligners import TableAligner
from kvalign.aligners.base import CONFIG
from kvalign.commands.train import TrainSettings
from kvalign.data_gen.store import TARGETS, Store, open_store
from kvalign.training.aligner_folder import command_line, config_for, describe_data, save

log = logging.getLogger(__name__)

_READ = ("data", "out", "aligner_kind", "target", "num_threads", "resume", "overwrite", "json")


def train(settings: TrainSettings) -> dict[str, dict[str, Any]]:
    """Estimate tables and save the aligner in `settings.out`; a target not asked for stays zero.

    Returns:
        as `kvalign.training.align_run.train` does.

    Raises:
        FileNotFoundError: no recorded data.
        FileExistsError: `out` holds an aligner, and `overwrite` is not set.
        ValueError: unfinished or damaged data, or a rotary model.
    """
    for name, value in settings.as_dict().items():
        if name not in _READ and value != TrainSettings.__dataclass_fields__[name].default:
            log.warning("a table has no %s: %s has no effect", name, value)
    store = open_store(settings.data)
    if store.config["model"]["family"] == "rotary":
        raise ValueError(
            f"{store.config['model']['name']} is rotary: its keys are moved exactly by rotation, "
            "and a table is for learned or alibi positions; use --aligner-kind network"
        )
    if (settings.out / CONFIG).exists() and not settings.overwrite:
        raise FileExistsError(
            f"{settings.out} already holds an aligner: give --overwrite or another --out"
        )
    # From birth to now at once, so any number of entries can be evicted: multiples of 1.
    aligner = TableAligner(config_for(TableAligner.kind, store, (1,), {}))
    made = {
        "command": command_line(settings),
        "device": platform.machine(),
        "versions": {name: version(name) for name in ("kvalign", "torch")},
        "data": describe_data(store),
    }
    results = {}
    for target in TARGETS if settings.target == "both" else (settings.target,):
        start = time.perf_counter()
        table = getattr(aligner, target)
        table.data = mean_table(store, target)
        seconds = round(time.perf_counter() - start, 3)
        results[target] = {**_measure(table.data, store, target), "seconds": seconds, **made}
        if not results[target]["used"]:
            table.data.zero_()
        aligner.config.training[target] = results[target]
    save(aligner, settings.out)
    return results


def mean_table(store: Store, target: str) -> Tensor:
    """Mean `key` or `value` at each position of the training chunks: [L, H, chunk_len, D].

    Both encodings of a chunk count: with all its tokens, and without the evicted ones. Positions of
    the sinks stay zero: a sink never moves.
    """
    num_layers, num_heads, _, head_dim = next(iter(store.config["shapes"].values()))
    chunk_len, num_sinks = (store.config["settings"][name] for name in ("chunk_len", "num_sinks"))
    sums = torch.zeros(num_layers, num_heads, chunk_len, head_dim, dtype=torch.float64)
    counts = torch.zeros(chunk_len, 1, dtype=torch.float64)
    for shard in store.shards("train"):
        stale, aligned = shard.tensors(target)
        for first, entries in ((num_sinks + shard.num_evicted, stale), (num_sinks, aligned)):
            positions = slice(first, first + entries.shape[3])
            sums[:, :, positions] += entries.sum(0, dtype=torch.float64)
            counts[positions] += len(entries)
    return (sums / counts.clamp(min=1)).float()


def _measure(table: Tensor, store: Store, target: str) -> dict[str, Any]:
    """Mean squared errors on the validation chunks: moved by the table, and unchanged."""
    chunk_len, num_sinks = (store.config["settings"][name] for name in ("chunk_len", "num_sinks"))
    moved = unchanged = 0.0
    num_numbers = 0
    for shard in store.shards("val"):
        k = shard.num_evicted
        move = table[:, :, num_sinks : chunk_len - k] - table[:, :, num_sinks + k : chunk_len]
        stale, aligned = (x.float() for x in shard.tensors(target))
        moved += (stale + move - aligned).square().sum(dtype=torch.float64).item()
        unchanged += (stale - aligned).square().sum(dtype=torch.float64).item()
        num_numbers += stale.numel()
    return {
        "val_loss": moved / num_numbers,
        "input_label_mse": unchanged / num_numbers,
        "ratio": moved / unchanged if unchanged else None,
        "used": moved < unchanged,
    }
