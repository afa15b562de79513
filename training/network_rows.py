"""Batches of recorded rows, gathered from memory-mapped shards without a loop over rows.

A row is one entry of one layer and head: its vector before realignment (stale, the input) and after
(aligned, the label). Its number in the shard gives its location. The order of training depends only
on the seed and the epoch, so a run resumes at the batch where it stopped.

If several shifts were recorded, the network makes moves of the smallest. A row whose shift is k
times as large goes through the network k times, each time on the network's own output.
"""

from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from kvalign.data_gen.store import Shard, Store
from kvalign.foundation.errors import UserError

_Step = tuple[int, int, int]
OPEN_SHARDS = 8  # of 64 MB by default: enough to mix some fifty chunks of DistilGPT2


class Batch(NamedTuple):
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
    """Shards cut into batches of nearly the same size, some of which are this rank's.

    A batch is planned as (window, shard, part); one window of shards is open at a time.
    """

    def __init__(
        self, shards: list[Shard], kv: str, batch_size: int, *, rank: int = 0, world_size: int = 1
    ):
        self.shards, self.kv, self.rank, self.world_size = shards, kv, rank, world_size
        self.shift = min(shard.num_evicted for shard in shards)
        self.parts = [-(-shard.num_rows // batch_size) for shard in shards]

    def _gather(self, plan: list[_Step], rows_of: Callable[[int], Tensor]) -> Iterator[Batch]:
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
    """Every row once, in stored order, for validation. Ranks take the batches in turn."""

    def __len__(self) -> int:
        return len(range(self.rank, sum(self.parts), self.world_size))

    def __iter__(self) -> Iterator[Batch]:
        plan = [(i, i, part) for i, num_parts in enumerate(self.parts) for part in range(num_parts)]
        mine = plan[self.rank :: self.world_size]
        return self._gather(mine, lambda i: torch.arange(self.shards[i].num_rows))


class Shuffled(_Batches):
    """Every row once per epoch in random order.

    Shards come in random order, in the first epoch from the smallest shift to the largest (a
    curriculum). `OPEN_SHARDS` are open at a time, and their batches alternate at random. Each
    `iter` continues after the last batch; the end of an epoch is the end of the iterator. All ranks
    get the same number of batches, so up to `world_size - 1` batches of an epoch are left out.
    """

    def __init__(self, shards: list[Shard], kv: str, batch_size: int, seed: int = 0, **share: int):
        super().__init__(shards, kv, batch_size, **share)
        self.seed, self.drawn = seed, 0

    def __len__(self) -> int:
        return sum(self.parts) // self.world_size

    def __iter__(self) -> Iterator[Batch]:
        epoch, first = divmod(self.drawn, len(self))
        mine = self._plan(epoch)[self.rank :: self.world_size][first : len(self)]

        def rows_of(i: int) -> Tensor:
            rng = np.random.default_rng((self.seed, epoch, i))
            return torch.from_numpy(rng.permutation(self.shards[i].num_rows))

        for batch in self._gather(mine, rows_of):
            self.drawn += 1
            yield batch

    def _plan(self, epoch: int) -> list[_Step]:
        """The batches of an epoch, for all ranks."""
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


def gather(stale: Tensor, aligned: Tensor, rows: Tensor) -> Batch:
    """Rows by their number in a shard.

    Args:
        stale, aligned: [num_chunks, L, H, S, D], contiguous, any float dtype.
        rows: [N] int64, each in 0 .. num_chunks * L * H * S - 1.
    """
    _, num_layers, num_heads, num_slots, head_dim = stale.shape
    above = rows // num_slots
    return Batch(
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

    def num_batches(self, world_size: int) -> int:
        """Training batches per epoch of each device; UserError if there are none."""
        if not (num_batches := len(self._shuffle(world_size=world_size))):
            raise UserError(
                f"--batch-size {self.batch_size} leaves no batch for each of {world_size} devices"
            )
        return num_batches

    def train_dataloader(self) -> Shuffled:
        return self._shuffle(**self._share())

    def val_dataloader(self) -> InOrder:
        return InOrder(self.shards["val"], self.kv, self.batch_size, **self._share())

    def _shuffle(self, **share: int) -> Shuffled:
        return Shuffled(self.shards["train"], self.kv, self.batch_size, self.seed, **share)

    def _share(self) -> dict[str, int]:
        if self.trainer is None:
            return {}
        return {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
