"""Tensors that are alive in this process, with the garbage collector out of the way."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def live_bytes() -> int:
    """Bytes of all tensors that somebody holds, each storage once; a compiler's have no data."""
    with_data = torch.Tensor, torch.nn.Parameter
    tensors = [x for x in gc.get_objects() if type(x) in with_data]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


@contextmanager
def no_collections() -> Iterator[None]:
    """A block in which only what nobody refers to goes."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
