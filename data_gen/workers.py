"""Who encodes chunks and writes shards: this process, or workers on Ray, a whole shard each.

A recording computes on one thread a process: sums in another order would change the last bits, and
its bytes must not depend on how many workers there are.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvalign.aligners.network_sizes import KV
from kvalign.cluster import ray_session
from kvalign.data_gen.chunks import ShardChunks
from kvalign.data_gen.config import PAIRS
from kvalign.data_gen.pairs import record_pairs, squared_error
from kvalign.data_gen.settings import RecordSettings
from kvalign.data_gen.store import Shard, ShardNotes, write_shard
from kvalign.errors import UserError
from kvalign.models import LoadedModel, load_model

OnTokens = Callable[[int], object]


@dataclass(frozen=True)
class Task:
    """Shards to write of the same chunks: one for each number evicted."""

    chunks: ShardChunks
    shards: list[Shard]
    tokens_sha256: str


@contextmanager
def writer(
    settings: RecordSettings, loaded: LoadedModel, on_tokens: OnTokens
) -> Iterator[Callable[[Task], None]]:
    """What takes tasks; all of them are done when the context ends.

    Args:
        settings: of the recording; with several workers each loads the model itself.
        loaded: for a single worker, this process.
        on_tokens: told the number of tokens encoded since the last call.

    Raises:
        UserError: numbers that do not fit the stored type.
    """
    if settings.workers > 1:
        with _on_ray(settings, on_tokens) as take:
            yield take
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield lambda task: write_task(settings, loaded, task, on_tokens)
    finally:
        torch.set_num_threads(num_threads)


def write_task(
    settings: RecordSettings, loaded: LoadedModel, task: Task, on_tokens: OnTokens
) -> None:
    """Encode the chunks of a task, a batch at a time, and write its shards."""
    dtype = getattr(torch, settings.dtype)
    parts: dict[int, list[list[Tensor]]] = {shard.num_evicted: [] for shard in task.shards}
    for ids in task.chunks.ids.split(settings.batch_size):
        for shift, pairs in record_pairs(loaded, ids, settings.num_sinks, tuple(parts)).items():
            parts[shift].append([x.to("cpu", dtype) for x in pairs])
        on_tokens(ids.numel())
    for shard in task.shards:
        batches = parts.pop(shard.num_evicted)
        stored = [torch.cat(batch) for batch in zip(*batches, strict=True)]
        if not all(x.isfinite().all() for x in stored):
            raise UserError(
                f"keys or values of {loaded.spec.name} do not fit --dtype {settings.dtype}: "
                "take bfloat16 or float32"
            )
        tensors = dict(zip(PAIRS, stored, strict=True))
        squares = {kv: squared_error(tensors[f"{kv}_stale"], tensors[f"{kv}_aligned"]) for kv in KV}
        notes = ShardNotes(squared_error=squares, tokens_sha256=task.tokens_sha256)
        write_shard(shard, {**tensors, "chunk": task.chunks.chunk_indices}, notes)


class _Worker:
    """A process of its own: one model, one thread, one shard at a time."""

    def __init__(self, settings: RecordSettings, folder: str):
        os.chdir(folder)  # relative paths are those of the command
        torch.set_num_threads(1)
        self.settings, self.loaded = settings, load_model(settings.model, settings.device)

    def write(self, task: Task) -> tuple[int, str]:
        """Tokens encoded, and what went wrong."""
        try:
            write_task(self.settings, self.loaded, task, lambda num_tokens: None)
        except UserError as error:
            return 0, str(error)
        return task.chunks.ids.numel(), ""


@contextmanager
def _on_ray(settings: RecordSettings, on_tokens: OnTokens) -> Iterator[Callable[[Task], None]]:
    """Workers take a task each as they become free; one that dies is started anew and its task
    redone.
    """
    with ray_session(settings.ray_address) as ray:
        num_gpus = int(settings.device.startswith("cuda"))
        kind = ray.remote(num_cpus=1, num_gpus=num_gpus, max_restarts=-1, max_task_retries=-1)
        actor: Any = kind(_Worker)
        free = [actor.remote(settings, str(Path.cwd())) for _ in range(settings.workers)]
        busy: dict[Any, Any] = {}

        def wait_for_one() -> None:
            (done,), _ = ray.wait(list(busy), num_returns=1)
            num_tokens, error = ray.get(done)
            if error:
                raise UserError(error)
            free.append(busy.pop(done))
            on_tokens(num_tokens)

        def take(task: Task) -> None:
            if not free:
                wait_for_one()
            worker = free.pop()
            busy[worker.write.remote(task)] = worker

        yield take
        while busy:
            wait_for_one()
