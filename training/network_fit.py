"""Training of one realignment network with Lightning: mean squared error, AdamW, early stopping.

The paper's protocol: at most 3 epochs, 5 validation reports in each, weight decay 0.01. The weights
with the best validation loss are kept. `last.ckpt` is written at each report, and a resumed run
ends in the same weights.

Batches are rows that are gathered from memory-mapped shards without a loop over rows. A row is one
entry of one layer and head: its vector before realignment (stale, the input) and after (aligned,
the label). Its number in the shard gives its location. The order of training depends only on the
seed and the epoch, so a run resumes at the batch where it stopped. If several shifts were recorded,
the network makes moves of the smallest. A row whose shift is k times as large goes through the
network k times, each time on the network's own output.
"""

import logging
import math
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.nn.functional import mse_loss

from kvalign.aligners import RealignNet
from kvalign.data_gen.store import Shard, Store
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import write_whole
from kvalign.training.settings import NetworkSettings

_Step = tuple[int, int, int]
OPEN_SHARDS = 8  # of 64 MB by default: enough to mix some fifty chunks of DistilGPT2


class RowBatch(NamedTuple):
    """Rows stale and aligned [N, D] float32, with their locations: [N] int64 each.

    Position 0 is the first slot after the sinks, and `position` that after the last of `num_moves`
    moves by `shift` positions each.
    """

    stale: Tensor
    aligned: Tensor
    position: Tensor
    layer: Tensor
    head: Tensor
    shift: int = 1
    num_moves: int = 1


class _Batches:
    """Shards cut into batches of nearly the same size.

    A batch is planned as (window, shard, part); one window of shards is open at a time.
    """

    def __init__(self, shards: list[Shard], kv: str, batch_size: int):
        self.shards, self.kv = shards, kv
        self.shift = min(shard.num_evicted for shard in shards)
        self.parts = [-(-shard.num_rows // batch_size) for shard in shards]

    def __len__(self) -> int:
        return sum(self.parts)

    def _gather(self, plan: list[_Step], rows_of: Callable[[int], Tensor]) -> Iterator[RowBatch]:
        for _, steps in groupby(plan, key=itemgetter(0)):
            opened: dict[int, tuple[Tensor, Tensor, tuple[Tensor, ...]]] = {}
            for _, i, part in steps:
                if i not in opened:
                    parts = rows_of(i).tensor_split(self.parts[i])
                    opened[i] = (*self.shards[i].tensors(self.kv), parts)
                stale, aligned, parts = opened[i]
                batch = gather(stale, aligned, parts[part])
                num_moves = self.shards[i].num_evicted // self.shift
                yield batch._replace(shift=self.shift, num_moves=num_moves)


class InOrder(_Batches):
    """Every row once, in stored order, for validation."""

    def __iter__(self) -> Iterator[RowBatch]:
        plan = [(i, i, part) for i, num_parts in enumerate(self.parts) for part in range(num_parts)]
        return self._gather(plan, lambda i: torch.arange(self.shards[i].num_rows))


class Shuffled(_Batches):
    """Every row once per epoch in random order.

    Shards come in random order, in the first epoch from the smallest shift to the largest (a
    curriculum). `OPEN_SHARDS` are open at a time, and their batches alternate at random. Each
    `iter` continues after the last batch; the end of an epoch is the end of the iterator.
    """

    def __init__(self, shards: list[Shard], kv: str, batch_size: int, seed: int = 0):
        super().__init__(shards, kv, batch_size)
        self.seed, self.drawn = seed, 0

    def __iter__(self) -> Iterator[RowBatch]:
        epoch, first = divmod(self.drawn, len(self))

        def rows_of(i: int) -> Tensor:
            rng = np.random.default_rng((self.seed, epoch, i))
            return torch.from_numpy(rng.permutation(self.shards[i].num_rows))

        for batch in self._gather(self._plan(epoch)[first:], rows_of):
            self.drawn += 1
            yield batch

    def _plan(self, epoch: int) -> list[_Step]:
        """The batches of an epoch."""
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(len(self.shards)).tolist()
        if epoch == 0:
            order.sort(key=lambda i: self.shards[i].num_evicted)
        plan = []
        for start in range(0, len(order), OPEN_SHARDS):
            window = order[start : start + OPEN_SHARDS]
            steps = [(start, i, part) for i in window for part in range(self.parts[i])]
            plan += [steps[n] for n in rng.permutation(len(steps))]
        return plan

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


def gather(stale: Tensor, aligned: Tensor, rows: Tensor) -> RowBatch:
    """Rows by their number in a shard.

    Args:
        stale, aligned: [num_chunks, L, H, S, D], contiguous, any float dtype.
        rows: [N] int64, each in 0 .. num_chunks * L * H * S - 1.
    """
    _, num_layers, num_heads, num_slots, head_dim = stale.shape
    above = rows // num_slots
    return RowBatch(
        stale.view(-1, head_dim).index_select(0, rows).float(),
        aligned.view(-1, head_dim).index_select(0, rows).float(),
        position=rows % num_slots,
        layer=above // num_heads % num_layers,
        head=above % num_heads,
    )


class RecordedRows(pl.LightningDataModule):
    """Training and validation batches of `key` or `value` vectors, of all recorded shifts;
    UserError if a shift is not a multiple of the smallest.
    """

    def __init__(self, store: Store, kv: str, batch_size: int, seed: int = 0):
        super().__init__()
        if any(shift % store.shifts[0] for shift in store.shifts):
            raise UserError(
                f"{store.folder} has shifts of {', '.join(map(str, store.shifts))}, which must be "
                f"multiples of the smallest: record others with kvalign gen-data --num-evicted"
            )
        self.shards = {split: store.shards(split) for split in ("train", "val")}
        self.kv, self.batch_size, self.seed = kv, batch_size, seed

    def train_dataloader(self) -> Shuffled:
        return Shuffled(self.shards["train"], self.kv, self.batch_size, self.seed)

    def val_dataloader(self) -> InOrder:
        return InOrder(self.shards["val"], self.kv, self.batch_size)


BEST, LAST = "best.ckpt", "last.ckpt"
LOG_EVERY = 50  # steps between reports of the training loss
MAX_GRADIENT = 1.0  # its norm; one through many moves may explode


class Realignment(pl.LightningModule):
    """`RealignNet` with its training; a checkpoint contains nothing else."""

    def __init__(self, net: RealignNet, lr: float, weight_decay: float):
        super().__init__()
        self.net, self.lr, self.weight_decay = net, lr, weight_decay

    def training_step(self, batch: RowBatch, batch_idx: int) -> Tensor:
        train_loss = loss(self.net, batch)
        if batch_idx % LOG_EVERY == 0:
            for logger in self.loggers:
                logger.log_metrics({"train_loss": train_loss.item()}, step=self.global_step)
        return train_loss

    def validation_step(self, batch: RowBatch, batch_idx: int) -> None:
        self.log("val_loss", loss(self.net, batch), batch_size=len(batch.stale))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        fused = self.device.type in ("cpu", "cuda")
        return torch.optim.AdamW(
            self.parameters(), lr=self.lr, weight_decay=self.weight_decay, fused=fused
        )


def fit(
    net: RealignNet,
    rows: RecordedRows,
    settings: NetworkSettings,
    work_dir: Path,
    callbacks: Sequence[pl.Callback] = (),
) -> pl.Trainer:
    """Train `net` in place, from `work_dir / last.ckpt` if it exists; keep its best weights.

    Args:
        callbacks: called after our own, but before the checkpoints are written.

    Raises:
        UserError: a device that this machine does not have.
        KeyboardInterrupt: stopped by the user; the next call resumes at the last validation report.
    """
    last, module = work_dir / LAST, Realignment(net, settings.lr, settings.weight_decay)
    interrupt = signal.getsignal(signal.SIGINT)
    with _quiet():
        try:
            trainer = _trainer(rows, settings, work_dir, callbacks)
            checkpoint = last if last.exists() else None
            trainer.fit(module, datamodule=rows, ckpt_path=checkpoint, weights_only=True)
        except MisconfigurationException as error:
            raise UserError(f"--accelerator {settings.accelerator}: {error}") from error
        except SystemExit as end:  # Lightning's answer to Ctrl-C, which it also switches off
            signal.signal(signal.SIGINT, interrupt)
            raise KeyboardInterrupt from end
    best_weights(net.cpu(), work_dir)
    return trainer


def planned_rows(rows: RecordedRows, settings: NetworkSettings) -> int:
    """Most rows of a fit and of `losses` after it, validation included."""
    num_train, num_val = (sum(x.num_rows for x in rows.shards[s]) for s in ("train", "val"))
    num_batches, num_epochs = len(rows.train_dataloader()), float(settings.max_epochs)
    if settings.max_steps:
        num_epochs = min(num_epochs, settings.max_steps / num_batches)
    num_vals = math.ceil(settings.vals_per_epoch * num_epochs) + 1
    return int(num_epochs * num_train) + num_vals * num_val


def best_weights(net: RealignNet, work_dir: Path) -> None:
    saved = torch.load(work_dir / BEST, map_location="cpu", weights_only=True)["state_dict"]
    net.load_state_dict({name.removeprefix("net."): weight for name, weight in saved.items()})


def loss(net: RealignNet, batch: RowBatch) -> Tensor:
    """Mean squared error per number of the rows after all their moves: [] float32."""
    x = batch.stale
    for moves_left in reversed(range(batch.num_moves)):
        x = net(x, batch.position + moves_left * batch.shift, batch.layer, batch.head)
    return mse_loss(x, batch.aligned)


@torch.no_grad()
def losses(net: RealignNet, batches: Iterable[RowBatch]) -> tuple[float, float]:
    """Mean squared errors against the labels, with and without realignment."""
    sums, num_rows = torch.zeros(2, dtype=torch.float64), 0
    for batch in batches:
        stale = mse_loss(batch.stale, batch.aligned)
        sums += len(batch.stale) * torch.stack([loss(net, batch), stale]).double()
        num_rows += len(batch.stale)
        progress.advance(len(batch.stale))
    realigned, unchanged = (sums / num_rows).tolist()
    return realigned, unchanged


def _trainer(
    rows: RecordedRows, settings: NetworkSettings, work_dir: Path, callbacks: Sequence[pl.Callback]
) -> pl.Trainer:
    num_batches = len(rows.train_dataloader())
    num_steps = min(num_batches, settings.max_steps or num_batches)
    num_reports = math.ceil(settings.vals_per_epoch * num_steps / num_batches)
    checkpoint = partial(
        ModelCheckpoint, work_dir, save_on_train_epoch_end=False, enable_version_counter=False
    )
    return pl.Trainer(
        accelerator=settings.accelerator,
        devices=1,
        max_epochs=settings.max_epochs,
        max_steps=settings.max_steps or -1,
        num_sanity_val_steps=0,
        val_check_interval=max(1, num_steps // num_reports),
        log_every_n_steps=min(LOG_EVERY, num_batches),
        gradient_clip_val=MAX_GRADIENT,
        enable_progress_bar=False,  # Lightning's own writes to stdout
        enable_model_summary=False,
        default_root_dir=work_dir,
        plugins=[_WholeFiles(), LightningEnvironment()],  # no cluster's, such as SLURM's
        logger=[CSVLogger(work_dir, name="csv"), TensorBoardLogger(work_dir, name="tensorboard")],
        callbacks=[
            EarlyStopping("val_loss", patience=settings.patience, check_on_train_epoch_end=False),
            checkpoint(filename=Path(BEST).stem, monitor="val_loss"),
            checkpoint(filename=Path(LAST).stem, monitor=None),
            Timer(),
            _Progress(rows.batch_size),
            *callbacks,
        ],
    )


class _WholeFiles(TorchCheckpointIO):
    """Lightning writes checkpoints into the system's temporary folder and moves them here."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        write_whole(Path(path), lambda partial: torch.save(checkpoint, partial))


class _Progress(pl.Callback):
    def __init__(self, batch_size: int):
        self.batch_size = batch_size

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        progress.skip(trainer.global_step * self.batch_size)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *batch: Any) -> None:
        progress.advance(len(batch[0].stale))

    on_validation_batch_end = on_train_batch_end

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        progress.advance(0, val_loss=f"{trainer.callback_metrics['val_loss']:.3g}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's tips, device reports and two warnings that say nothing of this run."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in ("Checkpoint directory .* exists and is", ".*LeafSpec.* is deprecated"):
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
