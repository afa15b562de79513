"""Limit of a step on a GPU: the bytes that it must read, at the bandwidth of the card."""

import functools
import time

import torch

from kvalign.cache.on_read import OnRead
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.eval.evaluations.latency.bare_step import BareStep
from kvalign.foundation.device import wait_for
from kvalign.methods.base import Method
from kvalign.models.packed import num_bytes

_SIZE, _TIMES = 2**28, 5  # float32 numbers of a copy: 1 GB


@functools.cache
def bandwidth(device: torch.device) -> float:
    """Bytes that a device reads and writes in a second, by copies of 1 GB."""
    source = torch.empty(_SIZE, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    wait_for(device)
    start = time.perf_counter()
    for _ in range(_TIMES):
        target.copy_(source)
    wait_for(device)
    return 2 * _TIMES * source.nbytes / (time.perf_counter() - start)


def read_bytes(method: Method, batch_size: int) -> int:
    """Bytes that a step of one token in each row reads at least: weights, except those of the
    embedding that are not the head's, and, unless it re-encodes, entries and tables.
    """
    model, spec, sizes = method.model, method.spec, method.sizes
    is_bare, cache = isinstance(method, BareStep), getattr(method, "cache", None)
    num_read = num_bytes(model)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    of_head = {x.data_ptr() for x in (*head.parameters(), *head.buffers())}
    num_read -= sum(x.nbytes for x in embedding.parameters() if x.data_ptr() not in of_head)
    if not is_bare and not (isinstance(cache, StreamingCache) and cache.memory is None):
        return num_read
    width, itemsize = spec.head_dim, model.dtype.itemsize
    if isinstance(cache, StreamingCache) and cache.stores_bare:
        width, itemsize = width + 4, 1
    of_layer = 2 * spec.num_kv_heads * sizes.first_input_len
    num_read += batch_size * len(spec.attention) * of_layer * width * itemsize
    if isinstance(cache, StreamingCache) and isinstance(cache.realigner, OnRead):
        table = cache.realigner.table
        num_read += len(spec.attention) * of_layer * (spec.head_dim + 1) * table.key.itemsize
    return num_read
