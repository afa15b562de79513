"""How fast the paper's network trains on this CPU, beside bare matrix products of the same shapes.

    python tests/scripts/throughput.py --hidden1 128 --hidden2 128

Prints one JSON document with a row for each: rows a second of the products alone, of training
(forward, backward, AdamW) on one batch, and of training with a newly gathered batch each step; and
as shares of the first. The three take turns, so that other work on the machine slows them alike;
the best of each tells more than the median on a busy machine.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvalign.aligners import RealignNet
from kvalign.app.cli.arguments import parse
from kvalign.data_gen.store import Shard
from kvalign.eval.protocol.document import document
from kvalign.foundation.settings import Settings, option
from kvalign.training.network_fit import Batch, Realignment, Shuffled, loss


@dataclass(frozen=True, kw_only=True)
class ThroughputSettings(Settings):
    """Measure rows a second of training on this CPU; defaults have DistilGPT2's shape."""

    batch_size: int = option(8192, help="rows a step", at_least=1)
    head_dim: int = option(64, help="numbers of a row", at_least=1)
    hidden1: int = option(128, help="first hidden size", at_least=1)
    hidden2: int = option(128, help="second hidden size", at_least=1)
    num_positions: int = option(251, help="positions after the sinks", at_least=1)
    num_layers: int = option(6, help="layers", at_least=1)
    num_heads: int = option(12, help="KV heads", at_least=1)
    num_chunks: int = option(14, help="chunks of the one shard", at_least=1)
    num_rounds: int = option(30, help="steps of each kind to take the median of", at_least=1)
    num_threads: int = option(0, help="CPU threads, 0 for all", at_least=0)


def measure(settings: ThroughputSettings) -> dict:
    """A document of rows a second of products, training and training_gathered, and shares of the
    first.
    """
    started = time.perf_counter()
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    with tempfile.TemporaryDirectory() as folder:
        batches = iter(_batches(settings, Path(folder)))
        batch = next(batches)
        step = _training_step(settings)
        kinds = {
            "products": _products(settings),
            "training": lambda: step(batch),
            "training_gathered": lambda: step(next(batches)),
        }
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for n in range(settings.num_rounds + 3):
            for name, run in kinds.items():
                start = time.perf_counter()
                run()
                if n >= 3:  # warm-up
                    times[name].append(time.perf_counter() - start)
    rows = [{"work": name} for name in times]
    for row in rows:
        for word, pick in (("median", statistics.median), ("best", min)):
            seconds = pick(times[row["work"]])
            row[f"{word}_rows_per_s"] = settings.batch_size / seconds
            row[f"{word}_share"] = pick(times["products"]) / seconds
    return document("script throughput", settings, rows, started=started)


def _training_step(settings: ThroughputSettings) -> Callable[[Batch], None]:
    shape = (settings.head_dim, settings.num_positions, settings.num_layers, settings.num_heads)
    net = RealignNet(*shape, hidden1=settings.hidden1, hidden2=settings.hidden2)
    optimizer = Realignment(net, lr=7e-4, weight_decay=0.01).configure_optimizers()

    def step(batch: Batch) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(net, batch).backward()
        optimizer.step()

    return step


def _products(settings: ThroughputSettings) -> Callable[[], None]:
    """All products of a step: outputs, gradients of weights and of hidden vectors."""
    n, sizes = (
        settings.batch_size,
        (settings.head_dim, settings.hidden1, settings.hidden2, settings.head_dim),
    )
    layers = list(pairwise(sizes))
    shapes = (
        [(n, a, b) for a, b in layers]
        + [(b, n, a) for a, b in layers]
        + [(n, b, a) for a, b in layers[1:]]
    )
    operands = [(torch.randn(i, j), torch.randn(j, k), torch.empty(i, k)) for i, j, k in shapes]

    def run() -> None:
        for left, right, out in operands:
            torch.mm(left, right, out=out)

    return run


def _batches(settings: ThroughputSettings, folder: Path):
    """Endless batches of random rows from one float16 shard."""
    sizes = ("chunks", "layers", "heads", "positions")
    shape = (*(getattr(settings, f"num_{name}") for name in sizes), settings.head_dim)
    name = "shard.safetensors"
    save_file(
        {f"key_{state}": torch.randn(shape, dtype=torch.float16) for state in ("stale", "aligned")},
        folder / name,
    )
    num_rows = (
        settings.num_chunks * settings.num_layers * settings.num_heads * settings.num_positions
    )
    about = dict(split="train", num_evicted=1, num_chunks=settings.num_chunks, num_rows=num_rows)
    shard = Shard(file=name, folder=folder, **about)
    shuffled = Shuffled([shard], "key", settings.batch_size, seed=0)
    while True:
        yield from shuffled


if __name__ == "__main__":
    settings, _ = parse(ThroughputSettings, sys.argv[1:], "python tests/scripts/throughput.py")
    print(json.dumps(measure(settings)))
