"""Workers that encode chunks and write whole shards: this process, or workers on Ray.

Each process computes on one thread: sums in another order would change the last bits, and the bytes
of a recording must not depend on the number of workers.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvalign.aligners.kinds import TARGETS
from kvalign.data_gen.chunks import ShardChunks
from kvalign.data_gen.pairs import record_pairs, squared_error
from kvalign.data_gen.settings import RecordSettings
from kvalign.data_gen.store import PAIRS, Shard, write_shard
from kvalign.foundation import progress
from kvalign.foundation.cluster import ray_session
from kvalign.foundation.device import AUTO
from kvalign.foundation.errors import UserError
from kvalign.models.loading import LoadedModel, load_model

Work = Iterable[tuple[ShardChunks, list[Shard]]]
"""Chunks, and the shards to write of them, one for each number evicted."""


def write_shards(settings: RecordSettings, loaded: LoadedModel, work: Work) -> None:
    """Write shards. A single worker is this process and uses the loaded model; several load it
    themselves.

    Raises:
        UserError: numbers that do not fit the stored type.
    """
    if settings.workers > 1:
        _write_on_ray(settings, work)
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for chunks, shards in work:
            record_chunks(settings, loaded, chunks, shards)
    finally:
        torch.set_num_threads(num_threads)


def record_chunks(
    settings: RecordSettings, loaded: LoadedModel, chunks: ShardChunks, shards: list[Shard]
) -> None:
    """Encode the chunks, a batch at a time, and write their shards."""
    dtype = getattr(torch, settings.dtype)
    parts: dict[int, list[list[Tensor]]] = {shard.num_evicted: [] for shard in shards}
    for ids in chunks.ids.split(settings.batch_size):
        for shift, pairs in record_pairs(loaded, ids, settings.num_sinks, tuple(parts)).items():
            parts[shift].append([x.to("cpu", dtype) for x in pairs])
        progress.advance(ids.numel())
    for shard in shards:
        batches = parts.pop(shard.num_evicted)
        stored = [torch.cat(batch) for batch in zip(*batches, strict=True)]
        if not all(x.isfinite().all() for x in stored):
            raise UserError(
                f"keys or values of {loaded.spec.name} do not fit --dtype {settings.dtype}: use "
                "bfloat16 or float32"
            )
        tensors = dict(zip(PAIRS, stored, strict=True))
        squares = {
            kv: squared_error(tensors[f"{kv}_stale"], tensors[f"{kv}_aligned"]) for kv in TARGETS
        }
        notes = {"squared_error": squares, "tokens_sha256": chunks.sha256()}
        write_shard(shard, {**tensors, "chunk": chunks.chunk_indices}, notes)


class _Worker:
    """A process of its own: one model, one thread, one shard at a time."""

    def __init__(self, settings: RecordSettings, folder: str):
        os.chdir(folder)  # relative paths are those of the command
        torch.set_num_threads(1)
        device = "cpu" if settings.device == AUTO else settings.device
        self.settings, self.loaded = settings, load_model(settings.model, device, "float32")

    def write(self, chunks: ShardChunks, shards: list[Shard]) -> tuple[int, str]:
        """Tokens encoded, and what went wrong."""
        try:
            record_chunks(self.settings, self.loaded, chunks, shards)
        except UserError as error:
            return 0, str(error)
        return chunks.ids.numel(), ""


def _write_on_ray(settings: RecordSettings, work: Work) -> None:
    """Workers write as they become free; one that dies is started anew and its work redone."""
    with ray_session(settings.ray_address) as ray:
        from ray.util import ActorPool

        num_gpus = int(settings.device.startswith("cuda"))
        kind = ray.remote(num_cpus=1, num_gpus=num_gpus, max_restarts=-1, max_task_retries=-1)
        actor: Any = kind(_Worker)
        workers = ActorPool(
            [actor.remote(settings, str(Path.cwd())) for _ in range(settings.workers)]
        )

        def wait_for_one() -> None:
            num_tokens, error = workers.get_next_unordered()
            if error:
                raise UserError(error)
            progress.advance(num_tokens)

        for shard in work:
            if not workers.has_free():
                wait_for_one()
            workers.submit(lambda worker, shard: worker.write.remote(*shard), shard)
        while workers.has_next():
            wait_for_one()
