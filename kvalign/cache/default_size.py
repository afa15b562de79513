"""Default size of a cache: as large as the model and the machine allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvalign import checkpoints
from kvalign.foundation.machine import free_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST_DEFAULT, OF_A_MINI = 4096, 128
_LEAST = 128  # of a machine without memory; what then does not fit is said where it is allocated
_SHARE = 1 / 4  # of the memory that is free, for the caches of all streams


def default_size(
    model: PreTrainedModel,
    *,
    longest: int | None = None,
    realign_every: int | None = None,
    num_streams: int = 1,
    cache_dtype: str | None = None,
) -> tuple[int, str]:
    """Default cache_size, and the reason for it in words: the smallest of four limits, the context
    length, the aligner's largest cache, a quarter of the free memory, and `LARGEST_DEFAULT`. For
    the shipped mini models `OF_A_MINI` is a fifth, so that they evict something.

    Args:
        longest: the aligner's largest cache; None: any.
        num_streams: number of streams to leave memory for.
    """
    from kvalign.models.architectures import spec_of

    spec, run_on = spec_of(model.config), (realign_every or 1) - 1
    limits = [(LARGEST_DEFAULT, "the largest default")]
    if spec.context_len is not None:
        room = spec.context_len - 1 - run_on
        limits.append((room, f"the context length {spec.context_len}"))
    if longest is not None:
        limits.append((longest - run_on, "the largest cache of its aligner"))
    if (free := free_bytes(model.device)) is not None:
        most = int(free * _SHARE / num_streams / bytes_of_an_entry(model, cache_dtype))
        limits.append((max(most, _LEAST), "a quarter of the free memory"))
    if spec.name in checkpoints.MODELS:
        limits.append((OF_A_MINI, "for a mini model, to show evictions"))
    return min(limits)


def bytes_of_an_entry(model: PreTrainedModel, cache_dtype: str | None = None) -> int:
    """Bytes that one token takes in a cache, in all layers."""
    from kvalign.models.architectures import spec_of

    spec = spec_of(model.config)
    of_a_vector = spec.head_dim * model.dtype.itemsize
    if cache_dtype == "int8":
        from kvalign.cache.int8 import Int8

        of_a_vector = Int8(model.dtype).width(spec.head_dim)
    return 2 * spec.num_layers * spec.num_kv_heads * of_a_vector
