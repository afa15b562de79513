"""Recalled entries of a segment: what its queries take back, as attention gets it."""

from typing import NamedTuple

from torch import Tensor


class Recalled(NamedTuple):
    """Entries that T queries take back.

    Attributes:
        scores: [B, H, G, T, R] float32, -inf of what is not there.
        values: [B, H, T, R, D], where each query finds them.
    """

    scores: Tensor
    values: Tensor
