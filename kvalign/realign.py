"""How kept entries are moved to their new positions, as the cache sees it.

Either the cache keeps entries without their position and gives them the one they have now, after
each eviction: one rounding, however often an entry moved, so half precision does not drift. Or it
hands a realigner its own last output, eviction after eviction, as the paper's network needs it.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.aligners import Aligner, Move, TableAligner
from kvalign.models import inv_freq, spec_of
from kvalign.rope import rerotate


class Realigner(ABC):
    """Moves kept keys and values; one instance serves all layers and holds no state."""

    recursive: bool
    """True: `place` is given its own last output, in float32; False: what `anchor` returned."""

    def anchor(
        self, layer: int, keys: Tensor, values: Tensor, born: Tensor | slice
    ) -> tuple[Tensor, Tensor]:
        """What the cache keeps of new entries [B, H, S, D] that were born at positions [S] or at
        those of a slice.
        """
        return keys, values

    @abstractmethod
    def place(self, layer: int, keys: Tensor, values: Tensor, move: Move) -> tuple[Tensor, Tensor]:
        """The entries [B, H, S, D] of the slots after the sinks, from what was kept of them."""


class FromBirth(Realigner):
    """Takes the position out of a new entry and gives it each later one in turn.

    Keys of a rotary model are rotated back to position 0 and from there to where they are (Xiao et
    al. 2024 keep keys before the rotation, too); values carry no position. An aligner works between
    the two rotations, so its tables do not depend on them.
    """

    recursive = False

    def __init__(self, model: PreTrainedModel, aligner: Aligner | None = None):
        self.inv_freq = inv_freq(model) if spec_of(model.config).family == "rotary" else None
        self.aligner = aligner.to(model.device) if aligner else None

    def anchor(
        self, layer: int, keys: Tensor, values: Tensor, born: Tensor | slice
    ) -> tuple[Tensor, Tensor]:
        if self.inv_freq is not None:
            back = torch.arange(born.start, born.stop) if isinstance(born, slice) else born
            keys = rerotate(keys, back, self.inv_freq)
        if self.aligner is None:
            return keys, values
        return self.aligner.anchor(layer, keys, values, born)

    def place(self, layer: int, keys: Tensor, values: Tensor, move: Move) -> tuple[Tensor, Tensor]:
        if self.aligner is not None:
            keys, values = self.aligner.realign(layer, keys, values, move)
        if self.inv_freq is not None:
            keys = rerotate(keys, -move.now, self.inv_freq)
        return keys, values

    @property
    def table(self) -> TableAligner | None:
        """The tables that placing uses, if it uses any."""
        return self.aligner if isinstance(self.aligner, TableAligner) else None


class Recursive(Realigner):
    """An aligner applied to its own output at each eviction, after the rotation if there is one."""

    recursive = True

    def __init__(self, model: PreTrainedModel, aligner: Aligner):
        self.inv_freq = inv_freq(model) if spec_of(model.config).family == "rotary" else None
        self.aligner = aligner.to(model.device)

    def place(self, layer: int, keys: Tensor, values: Tensor, move: Move) -> tuple[Tensor, Tensor]:
        if self.inv_freq is not None:
            keys = rerotate(keys, move.shift, self.inv_freq)
        return self.aligner.realign(layer, keys, values, move)


def closed_form(model: PreTrainedModel) -> Realigner | None:
    """What StreamingLLM does: rotation where positions are rotary; nothing moves learned or ALiBi
    entries.
    """
    return FromBirth(model) if spec_of(model.config).family == "rotary" else None


def trained(model: PreTrainedModel, aligner: Aligner) -> Realigner:
    """The realigner that an aligner is made for."""
    return Recursive(model, aligner) if aligner.recursive else FromBirth(model, aligner)
