"""Default number of entries in a cache: what the model and the machine allow."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvalign import checkpoints
from kvalign.foundation.memory import free_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST, OF_A_MINI = 4096, 128
_LEAST = 128  # of a machine without memory; what then does not fit is said where it is allocated
_SHARE = 1 / 4  # of the memory that is free, for the caches of all streams


class DefaultSize(NamedTuple):
    """Default cache_size, and the reason for it in words."""

    cache_size: int
    why: str


def default_size(
    model: PreTrainedModel,
    *,
    longest: int | None = None,
    realign_every: int | None = None,
    num_streams: int = 1,
    cache_dtype: str | None = None,
) -> DefaultSize:
    """The smallest of four limits: the context length, the aligner's largest cache, a quarter of
    the free memory, and `MOST`. For the shipped mini models `OF_A_MINI` is a fifth, so that they
    evict something.

    Args:
        longest: the aligner's largest cache; None: any.
        num_streams: number of streams to leave memory for.
    """
    from kvalign.cache.form import Form
    from kvalign.cache.guests import GUESTS
    from kvalign.models.architectures import spec_of

    spec, run_on = spec_of(model.config), (realign_every or 1) - 1
    limits = [DefaultSize(MOST, "the largest default")]
    if spec.context_len is not None:
        room = spec.context_len - 1 - run_on
        limits.append(DefaultSize(room, f"the context length {spec.context_len}"))
    if longest is not None:
        limits.append(DefaultSize(longest - run_on, "the largest cache of its aligner"))
    if model.device.type == "cuda":
        import torch

        free: int | None = torch.cuda.mem_get_info(model.device)[0]
    else:
        free = free_bytes()
    if free is not None:
        form = GUESTS["int8"](model.dtype) if cache_dtype == "int8" else Form(model.dtype)
        of_a_vector = form.width(spec.head_dim) * form.stored_dtype.itemsize
        of_an_entry = 2 * spec.num_layers * spec.num_kv_heads * of_a_vector
        most = int(free * _SHARE / num_streams / of_an_entry)
        limits.append(DefaultSize(max(most, _LEAST), "a quarter of the free memory"))
    if spec.name in checkpoints.MODELS:
        limits.append(DefaultSize(OF_A_MINI, "for a mini model, to show evictions"))
    return min(limits)
