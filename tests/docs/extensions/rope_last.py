"""Keys whose last dimensions are rotated: of each pair the two numbers lie half of these apart."""

import torch
from torch import Tensor

from kvalign.models.rope import Layout


def split(keys: Tensor, num_pairs: int) -> tuple[Tensor, Tensor, Tensor]:
    rest, turning = keys.tensor_split([keys.shape[-1] - 2 * num_pairs], -1)
    return *turning.chunk(2, -1), rest


LAST = Layout(split, lambda first, second, rest: torch.cat([rest, first, second], -1))
