"""The exact move of rotated keys: rotations add up, so turning a key back moves it to the front.

RoPE (Su et al. 2021) as transformers lays it out: the two numbers of a pair lie half the rotary
dimensions apart. A model's attention scaling (YaRN, LongRoPE) is in its keys and not applied again.
"""

import torch
from torch import Tensor


class Rotation:
    """How the keys of one rotary model move along positions: by `rerotate` with its `inv_freq`.

    Attributes:
        is_bounded: whether it is another rotation, or none, beyond the context length.
    """

    def __init__(self, inv_freq: Tensor, is_bounded: bool = True):
        self.inv_freq, self.is_bounded = inv_freq, is_bounded

    def shift(self, keys: Tensor, shift: int | Tensor) -> Tensor:
        """Keys [..., S, D] moved `shift` positions towards the start."""
        return rerotate(keys, shift, self.inv_freq)


def rerotate(keys: Tensor, shift: int | Tensor, inv_freq: Tensor) -> Tensor:
    """Move rotated keys `shift` positions towards the start; angles and products in float32.

    Args:
        keys: [..., S, D], already rotated; dimensions beyond the rotary ones (GPT-NeoX) stay.
        shift: positions, one number for all entries or [..., S]; negative moves away from the
            start.
        inv_freq: [rotary_dim / 2] float32, the model's own frequencies, scaling included
            (`kvalign.models.rotation_of`).

    Returns:
        [..., S, D] in the dtype of `keys`; a shift of 0 gives the very same numbers.
    """
    inv_freq = inv_freq.to(keys.device, torch.float32)
    steps = torch.as_tensor(shift, device=keys.device, dtype=torch.float32)
    angles = -steps[..., None] * inv_freq  # [rotary_dim / 2] or [S, rotary_dim / 2]
    cos, sin = angles.cos(), angles.sin()
    num_pairs = inv_freq.shape[0]
    first, second = keys[..., :num_pairs].float(), keys[..., num_pairs : 2 * num_pairs].float()
    parts = [
        (first * cos - second * sin).to(keys.dtype),
        (second * cos + first * sin).to(keys.dtype),
    ]
    rest = keys[..., 2 * num_pairs :].expand(*parts[0].shape[:-1], -1)
    return torch.cat([*parts, rest], dim=-1)
