"""RoPE as GPT-J has it: the two numbers of a pair are neighbours."""

import torch
from torch import Tensor

from kvalign.models.rope import Rotation


class InterleavedRotation(Rotation):
    """Moves keys whose first dimensions are rotated in neighbouring pairs; the others stay."""

    def shift(self, keys: Tensor, shift: int | Tensor) -> Tensor:
        num_rotated = 2 * len(self.inv_freq)
        rotated, rest = keys[..., :num_rotated], keys[..., num_rotated:]
        halves = rotated.unflatten(-1, (-1, 2)).mT.flatten(-2)
        moved = super().shift(halves, shift)
        return torch.cat([moved.unflatten(-1, (2, -1)).mT.flatten(-2), rest], -1)
