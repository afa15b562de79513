"""Exact move of rotated keys: rotations add up, so rotating a key back moves it towards the start.

RoPE (Su et al. 2021) rotates pairs of numbers. The layout says which two numbers of a key are a
pair. A model's attention scaling (YaRN, LongRoPE) is already in its keys, and is not applied again.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvalign.foundation.autograd import no_autograd_modes

NUM_SHIFTS = 8
"""Number of whole shifts whose angles are cached."""


class Layout(NamedTuple):
    """Layout of the pairs among the D numbers of a key.

    Attributes:
        split: splits keys [..., D], given the number of pairs, into both numbers of each pair [...,
            N] and the unrotated rest.
        join: the inverse of split.
    """

    split: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
    join: Callable[[Tensor, Tensor, Tensor], Tensor]


LAYOUTS = {
    # Llama: half the rotary dimensions apart.
    "halves": Layout(
        lambda x, n: (x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]),
        lambda first, second, rest: torch.cat([first, second, rest], -1),
    ),
    # GPT-J: side by side.
    "neighbours": Layout(
        lambda x, n: (x[..., : 2 * n : 2], x[..., 1 : 2 * n : 2], x[..., 2 * n :]),
        lambda first, second, rest: torch.cat(
            [torch.stack([first, second], -1).flatten(-2), rest], -1
        ),
    ),
}
"""Layouts to try on a model."""


class Angles(NamedTuple):
    """Cosines and sines of a move, [rotary_dim / 2] or [..., S, rotary_dim / 2] float32."""

    cos: Tensor
    sin: Tensor
    layout: str = "halves"

    @classmethod
    def of(cls, shift: int | Tensor, inv_freq: Tensor, layout: str = "halves") -> "Angles":
        steps = torch.as_tensor(shift, device=inv_freq.device, dtype=torch.float32)
        angles = -steps[..., None] * inv_freq
        return cls(angles.cos(), angles.sin(), layout)

    def rotate(self, keys: Tensor) -> Tensor:
        """Keys [..., S, D], moved."""
        split, join = LAYOUTS[self.layout]
        first, second, rest = split(keys, self.cos.shape[-1])
        first, second = first.float(), second.float()
        rotated = (first * self.cos - second * self.sin).to(keys.dtype)
        other = (second * self.cos + first * self.sin).to(keys.dtype)
        return join(rotated, other, rest.expand(*rotated.shape[:-1], -1))

    @property
    def inverse(self) -> "Angles":
        """The move back."""
        return Angles(self.cos, -self.sin, self.layout)

    def to(self, device: torch.device) -> "Angles":
        return Angles(self.cos.to(device), self.sin.to(device), self.layout)


class Rotation:
    """Rotation of the keys of one rotary model along positions, by `rerotate` with its `inv_freq`.

    Attributes:
        is_bounded: whether the rotation changes or ends beyond the context length.
        layout: key of `LAYOUTS`.
    """

    def __init__(self, inv_freq: Tensor, is_bounded: bool = True, layout: str = "halves"):
        self.inv_freq, self.is_bounded, self.layout = inv_freq, is_bounded, layout
        self._angles: dict[tuple[int, torch.device], Angles] = {}
        self._from_start: dict[torch.device, Angles] = {}

    def at(self, layer: int) -> "Rotation":
        """Rotation of a layer's keys."""
        return self

    def angles(self, shift: Tensor) -> Angles:
        """Angles that move keys so many positions [..., S] towards the start."""
        return Angles.of(shift, self.inv_freq.to(shift.device, torch.float32), self.layout)

    def angles_to(self, at: slice | Tensor, device: torch.device) -> Angles:
        """Angles that move keys from position 0 to the positions `at`, [..., S] or a slice of
        them.
        """
        if isinstance(at, Tensor):
            return self.angles(-at.to(device))
        angles = self._from_start.get(device)
        if angles is None or len(angles.cos) < at.stop:
            with no_autograd_modes():
                num = 1 << max(10, (at.stop - 1).bit_length())  # seldom made anew
                positions = torch.arange(num, device=device)
                angles = self._from_start[device] = self.angles(-positions)
        return Angles(angles.cos[at], angles.sin[at], self.layout)

    def shift(self, keys: Tensor, shift: int | Tensor) -> Tensor:
        """Keys [..., S, D], moved `shift` positions towards the start."""
        if isinstance(shift, Tensor):
            return rerotate(keys, shift, self.inv_freq, self.layout)
        # All layers of a step ask for the same few.
        key = shift, keys.device
        angles = self._angles.get(key)
        if angles is None:
            if len(self._angles) >= NUM_SHIFTS:
                self._angles.clear()
            with no_autograd_modes():
                inv_freq = self.inv_freq.to(keys.device, torch.float32)
                angles = self._angles[key] = Angles.of(shift, inv_freq, self.layout)
        return angles.rotate(keys)

    def shift_layers(self, keys: Tensor, shift: int | Tensor, dim: int) -> Tensor:
        """Same for the keys of all layers, stacked along `dim`."""
        return self.shift(keys, shift)


class RotationByLayer(Rotation):
    """Rotation of a model whose layers differ: some rotate faster, or not at all."""

    def __init__(self, layers: Sequence[Rotation]):
        self.layers, self.is_bounded = layers, any(layer.is_bounded for layer in layers)

    def at(self, layer: int) -> Rotation:
        return self.layers[layer]

    def shift_layers(self, keys: Tensor, shift: int | Tensor, dim: int) -> Tensor:
        pairs = zip(self.layers, keys.unbind(dim), strict=True)
        return torch.stack([layer.shift(x, shift) for layer, x in pairs], dim)


def rerotate(keys: Tensor, shift: int | Tensor, inv_freq: Tensor, layout: str = "halves") -> Tensor:
    """Move rotated keys `shift` positions towards the start; angles and products in float32.

    Args:
        keys: [..., S, D], already rotated; dimensions beyond the rotary ones (GPT-NeoX) stay
            unchanged.
        shift: positions, one number for all entries or [..., S]; negative moves away from the
            start.
        inv_freq: [rotary_dim / 2] float32, the model's own frequencies, scaling included
            (`kvalign.models.rotation_of`).
        layout: key of `LAYOUTS`.

    Returns:
        [..., S, D] in the dtype of `keys`; a shift of 0 returns the same numbers.
    """
    return Angles.of(shift, inv_freq.to(keys.device, torch.float32), layout).rotate(keys)
