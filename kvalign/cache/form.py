"""Form in which a cache stores entries: as attention reads them. `int8.py` has another, a guest."""

from typing import Protocol, Self

import torch
from torch import Tensor

from kvalign.aligners.entries import KV
from kvalign.foundation.errors import UserError
from kvalign.models.wrapped import no_autograd_modes

At = slice | Tensor
"""Positions of S entries: a slice, or [..., S] int64."""


class Form:
    """Form of stored keys and values: numbers of the model's dtype.

    Attributes:
        dtype: of entries as attention reads them.
        stored_dtype: of what is stored.
        names: of entries and sinks in a state.
        base: [H, 1, D] float32, what all keys are stored without; None: 0.
    """

    is_int8 = False
    names = ("entries", "sinks")
    base: Tensor | None = None

    def __init__(self, dtype: torch.dtype):
        self.dtype = self.stored_dtype = dtype

    def width(self, head_dim: int) -> int:
        """Stored numbers of a key or a value."""
        return head_dim

    @no_autograd_modes()
    def empty(self, like: Tensor, length: int) -> Tensor:
        """Room for so many entries beside one another, like these [..., S, D]."""
        shape = (*like.shape[:-2], length, self.width(like.shape[-1]))
        return like.new_zeros(shape, dtype=self.stored_dtype)

    def encode(self, x: Tensor) -> Tensor:
        """Keys or values [..., D] as they are stored, [..., width]; in floats they stay as they are
        and are cast where they are written.
        """
        return x

    def decode(self, stored: Tensor) -> Tensor:
        """Values, or keys without their base, [..., D] from what is stored: in floats a view."""
        return stored

    def encode_at(self, entries: KV, at: At) -> KV:
        """Entries [B, H, S, D] with keys at these positions, as they are stored."""
        return entries

    def decode_at(self, stored: KV, at: At) -> KV:
        """Entries [B, H, S, D] with keys at these positions, from what is stored."""
        return stored

    def without_position(self) -> Self:
        """Form of keys that have no position, where a position is not stored."""
        return self


class ReadTensor(Protocol):
    """Tensor of a saved state by name: [B, H, ...], then of this shape and dtype; on the model's
    device, if no other is given.
    """

    def __call__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | None = None,
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
