"""Tensors of a saved stream, checked when they are read."""

from typing import Protocol

import torch
from torch import Tensor

from kvalign.foundation.errors import UserError


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
