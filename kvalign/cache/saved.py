"""Tensors of a saved stream, checked when they are read; keys in 8 bits also as version 0.2 saved
them, with their rotation and base.
"""

import hashlib
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kvalign.cache.bare_keys import BareKeys
from kvalign.cache.form import Form
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError

_OLDER = {
    new.format(j): old.format(j)
    for new, old in (("bare.{}", "entries.{}"), ("bare_sinks.{}", "sinks.{}"))
    for j in range(2)
}
"""Names that 8 bits had in version 0.2, where keys were not bare."""


class ReadTensor(Protocol):
    """Tensor of a saved state by name: [B, H, ...], then of this shape and dtype; on the model's
    device, if no other is given.
    """

    def __call__(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str | None = None
    ) -> Tensor: ...


def expect_tensor(
    state: dict[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Tensor of a state; UserError unless it exists with this shape and dtype."""
    tensor = state.get(name)
    if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
        what = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
        raise UserError(f"a stream's {name} must be {shape} {dtype}, found {what}")
    return tensor


def has_placed_keys(state: dict[str, Tensor], layer_idx: int) -> bool:
    """Return whether version 0.2 saved the keys in 8 bits of a layer."""
    return f"{layer_idx}.bare.0" not in state


def older_name(name: str) -> str:
    """Name that entries in 8 bits had in version 0.2."""
    return _OLDER.get(name, name)


def with_bare_keys(
    name: str, keys: Tensor, bare: BareKeys, seen: list[int], frame: CacheSizes
) -> Tensor:
    """Stored form of keys of rows of so many tokens that version 0.2 stored under the older name of
    this one.
    """
    at: Tensor = torch.arange(keys.shape[2])
    form = Form(torch.float32, is_int8=True, bare=bare)
    if name.startswith("memory"):
        form = replace(form, bare=replace(bare, rotation=None))
    elif name.startswith("bare."):
        ends = torch.tensor([n - frame.num_moved(n) for n in seen])[:, None, None]
        at = ends + torch.arange(-keys.shape[2], 0)
    return form.encode(form.bare.of(form.decode(keys), at))


def checksum(about: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 of what a file says of its tensors, and of these with their names and shapes."""
    digest = hashlib.sha256(about.encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {list(x.shape)} ".encode())
        digest.update(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
