"""Sketch of a memory's keys in 4 bits, from which our kernel estimates scores.

    16 slots    [ D / 8 ] x [ 16 slots ] x [ 4 bytes ]    8 numbers of a key: 4 in the low halves

A key less its head's base (`Memory`), divided by a scale of its own, is rounded to 16 levels from
-7.5 to 7.5. The base adds the same to all scores, so it is not kept in them.
"""

import copy
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvalign.foundation.autograd import no_autograd_modes

BLOCK = 16
"""Slots whose numbers lie together: a number of each in a register."""
_MOST = 7.5


class Sketch:
    """Keys of the slots of a memory in 4 bits.

    Args:
        like: keys of the shape [B, H, ?, D].

    Attributes:
        numbers: [B, H, S / 16, D / 8, 16, 4] uint8.
        scales: [B, H, S] float32, of each key.
    """

    def __init__(self, like: Tensor):
        num_rows, num_heads, _, head_dim = like.shape
        self.numbers = like.new_zeros(
            num_rows, num_heads, 0, head_dim // 8, BLOCK, 4, dtype=torch.uint8
        )
        self.scales = like.new_zeros(num_rows, num_heads, 0)

    def write(self, rows: slice, slot: int, apart: Tensor) -> None:
        """Write keys less their base, [B, H, T, D], into the slots from this one on."""
        scales = apart.abs().amax(-1) / _MOST
        levels = (apart / scales.clamp_min(1e-30)[..., None]).add_(_MOST).round_().to(torch.uint8)
        fours = levels.view(torch.int32).unflatten(-1, (-1, 2))  # [B, H, T, D / 8, 2]
        fours = fours[..., 0] | fours[..., 1] << 4
        slots = torch.arange(slot, slot + apart.shape[2])
        by_slot = fours.permute(2, 0, 1, 3)  # as indices that a slice parts come first
        numbers = self.numbers.view(torch.int32)[..., 0]
        numbers[rows, :, slots // BLOCK, :, slots % BLOCK] = by_slot
        self.scales[rows, :, slot : slot + apart.shape[2]] = scales

    def lengthen(self, num_slots: int) -> None:
        """Have so many slots."""
        num_more = num_slots - self.scales.shape[2]
        self.numbers = pad(self.numbers, (0, 0, 0, 0, 0, 0, 0, num_more // BLOCK))
        self.scales = pad(self.scales, (0, num_more))

    @no_autograd_modes()
    def select(self, rows: Tensor) -> None:
        self.numbers, self.scales = self.numbers[rows], self.scales[rows]

    @classmethod
    @no_autograd_modes()
    def joined(cls, sketches: Sequence[Self]) -> Self:
        """Sketch of the rows of all these."""
        joined = copy.copy(sketches[0])
        joined.numbers = torch.cat([one.numbers for one in sketches])
        joined.scales = torch.cat([one.scales for one in sketches])
        return joined
