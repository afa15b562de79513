"""How the entries that stay are moved to their new positions, as the cache sees it.

Either the cache stores entries without their position and gives them their present one after each
eviction: one rounding, however often an entry moved, so half precision does not drift. Or a
realigner is given its own last output, eviction after eviction, as the paper's network needs it.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.aligners import Aligner, Move, TableAligner
from kvalign.models import rotation_of


class Realigner(ABC):
    """Moves keys and values; one instance serves all layers and has no state."""

    recursive: bool
    """True: `place` is given its own last output, in float32; False: what `anchor` returned."""

    def anchor(
        self, layer: int, keys: Tensor, values: Tensor, birth: Tensor | slice
    ) -> tuple[Tensor, Tensor]:
        """What the cache stores of new entries [B, H, S, D], computed at the positions `birth`, [S]
        int64 or a slice.
        """
        return keys, values

    @abstractmethod
    def place(self, layer: int, keys: Tensor, values: Tensor, move: Move) -> tuple[Tensor, Tensor]:
        """The entries [B, H, S, D] of the slots after the sinks, from what was stored of them."""


class FromBirth(Realigner):
    """Takes the position out of a new entry and gives it each later one in turn.

    Keys of a rotary model are rotated back to position 0 and from there to where they are (Xiao et
    al. 2024 keep keys before the rotation, too); values carry no position. An aligner works between
    the two rotations, so its tables do not depend on them.
    """

    recursive = False

    def __init__(self, model: PreTrainedModel, aligner: Aligner | None = None):
        self.rotation = rotation_of(model)
        self.aligner = aligner.to(model.device) if aligner else None

    def anchor(
        self, layer: int, keys: Tensor, values: Tensor, birth: Tensor | slice
    ) -> tuple[Tensor, Tensor]:
        if self.rotation is not None:
            positions = torch.arange(birth.start, birth.stop) if isinstance(birth, slice) else birth
            keys = self.rotation.shift(keys, positions)
        if self.aligner is None:
            return keys, values
        return self.aligner.anchor(layer, keys, values, birth)

    def place(self, layer: int, keys: Tensor, values: Tensor, move: Move) -> tuple[Tensor, Tensor]:
        if self.aligner is not None:
            keys, values = self.aligner.realign(layer, keys, values, move)
        if self.rotation is not None:
            keys = self.rotation.shift(keys, -move.now)
        return keys, values

    @property
    def table(self) -> TableAligner | None:
        """The tables that placing uses, if it uses any."""
        return self.aligner if isinstance(self.aligner, TableAligner) else None


class Recursive(Realigner):
    """An aligner applied to its own output at each eviction, after the rotation if there is one."""

    recursive = True

    def __init__(self, model: PreTrainedModel, aligner: Aligner):
        self.rotation = rotation_of(model)
        self.aligner = aligner.to(model.device)

    def place(self, layer: int, keys: Tensor, values: Tensor, move: Move) -> tuple[Tensor, Tensor]:
        if self.rotation is not None:
            keys = self.rotation.shift(keys, move.shift)
        return self.aligner.realign(layer, keys, values, move)


def closed_form(model: PreTrainedModel) -> Realigner | None:
    """What StreamingLLM does: rotation where positions are rotary; nothing moves learned or ALiBi
    entries.
    """
    return FromBirth(model) if rotation_of(model) else None


def trained(model: PreTrainedModel, aligner: Aligner) -> Realigner:
    """The realigner that an aligner is made for."""
    return Recursive(model, aligner) if aligner.recursive else FromBirth(model, aligner)
