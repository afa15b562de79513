"""Keys as 8 bits hold them: without the rotation of their position, and without a base.

    key at position p = R(p) (base + what is stored)

So an entry is rounded once, and in one way: whether a step, a prefill chunk or a segment wrote it,
and wherever it is read later. The base is the key that a head gives for an input of zeros: a key
bias. In some models (Qwen2) it is many times as large as the rest, which one scale could not hold
beside it.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kvalign.models import kernel
from kvalign.models.rope import Rotation

At = slice | Tensor
"""Positions of S entries: a slice, or [..., S] int64."""


class InSight(NamedTuple):
    """The entries that one query of each row sees.

    Attributes:
        places: [B, S] int64, the place of each slot's entry among those of its row; negative: it is
            not there.
        behind: [B, 1, 1] int64, the position of place 0.
        turns: of as many places, as our kernel takes them; None: keys do not turn.
    """

    places: Tensor
    behind: Tensor
    turns: Tensor | None


@dataclass(frozen=True)
class BareKeys:
    """Form of the keys of a layer.

    Args:
        rotation: of the layer's keys; None if they do not rotate.
        base: [H, 1, D] float32; None: 0.
    """

    rotation: Rotation | None = None
    base: Tensor | None = None

    def of(self, keys: Tensor, at: At) -> Tensor:
        """Stored form of keys [..., H, S, D] at these positions, in float32."""
        keys = keys.float()
        if self.rotation is not None:
            keys = self.rotation.turn_to(at, keys.device).inverse(keys)
        return keys if self.base is None else keys - self.base.to(keys.device)

    def placed(self, bare: Tensor, at: At) -> Tensor:
        """Keys at these positions, from what is stored of them, [..., H, S, D] float32."""
        if self.base is not None:
            bare = bare + self.base.to(bare.device)
        return bare if self.rotation is None else self.rotation.turn_to(at, bare.device)(bare)

    def attend(
        self, seen: InSight, query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        """Attention of queries [B, H, 1, D] by our kernel, which reads all slots of a ring as
        they are stored: [B, 1, H, D].
        """
        if seen.turns is not None and self.rotation is not None:  # which count from the first
            query = self.rotation.shift(query, seen.behind)
        base = None if self.base is None else self.base[:, 0]
        return kernel.attend(seen.places, query, keys, values, scale, seen.turns, base)
