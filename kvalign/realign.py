"""How kept entries are moved to their new positions, as the cache sees it.

A realigner either starts from the entry as it was born and computes it for the position it has now
(exact in half precision: one rounding, however often the entry moved), or works on its own output,
eviction after eviction.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from kvalign.aligners import Aligner
from kvalign.models import inv_freq, spec_of
from kvalign.rope import rerotate


@dataclass(frozen=True)
class Move:
    """One eviction, for the slots after the sinks.

    Attributes:
        shift: entries evicted: the places each kept entry moves towards the start.
        born: [S] int64, the position each kept entry had when it was computed.
        now: [S] int64, its position after the move.
    """

    shift: int
    born: Tensor
    now: Tensor


class Realigner(ABC):
    """Moves kept keys and values; one instance serves all layers and holds no state."""

    recursive: ClassVar[bool]
    """True: `move` is given its own last output, in float32; False: the entries as born."""

    @abstractmethod
    def move(self, layer: int, keys: Tensor, values: Tensor, move: Move) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, H, S, D] of the slots after the sinks for their positions
        now.
        """


class Rotation(Realigner):
    """The exact move of a rotary model: keys are rotated back, values carry no position (Xiao et
    al. 2024).
    """

    recursive = False

    def __init__(self, model: PreTrainedModel):
        self.inv_freq = inv_freq(model)

    def move(self, layer: int, keys: Tensor, values: Tensor, move: Move) -> tuple[Tensor, Tensor]:
        return rerotate(keys, move.born - move.now, self.inv_freq), values


class Trained(Realigner):
    """A trained aligner at each eviction, after the rotation where the model is rotary."""

    recursive = True

    def __init__(self, model: PreTrainedModel, aligner: Aligner):
        self.aligner = aligner.to(model.device)
        self.inv_freq = inv_freq(model) if spec_of(model.config).family == "rotary" else None

    def move(self, layer: int, keys: Tensor, values: Tensor, move: Move) -> tuple[Tensor, Tensor]:
        if self.inv_freq is not None:
            keys = rerotate(keys, move.shift, self.inv_freq)
        return self.aligner.realign(layer, keys, values, move.shift)


def closed_form(model: PreTrainedModel) -> Realigner | None:
    """What StreamingLLM does: rotation where positions are rotary; nothing moves learned or ALiBi
    entries.
    """
    return Rotation(model) if spec_of(model.config).family == "rotary" else None
