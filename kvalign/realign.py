"""How kept entries are moved to their new positions, as the cache sees it.

A realigner either starts from the entry as it was born and computes it for the position it has now
(exact in half precision: one rounding, however often the entry moved), or works on its own output,
eviction after eviction.
"""

from abc import ABC, abstractmethod

from torch import Tensor
from transformers import PreTrainedModel

from kvalign.aligners import Aligner, Move
from kvalign.models import inv_freq, spec_of
from kvalign.rope import rerotate


class Realigner(ABC):
    """Moves kept keys and values; one instance serves all layers and holds no state."""

    recursive: bool
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

    def __init__(self, model: PreTrainedModel, aligner: Aligner):
        self.aligner = aligner.to(model.device)
        self.recursive = aligner.recursive
        self.inv_freq = inv_freq(model) if spec_of(model.config).family == "rotary" else None

    def move(self, layer: int, keys: Tensor, values: Tensor, move: Move) -> tuple[Tensor, Tensor]:
        if self.inv_freq is not None:
            shift = move.shift if self.recursive else move.born - move.now
            keys = rerotate(keys, shift, self.inv_freq)
        return self.aligner.realign(layer, keys.float(), values.float(), move)


def closed_form(model: PreTrainedModel) -> Realigner | None:
    """What StreamingLLM does: rotation where positions are rotary; nothing moves learned or ALiBi
    entries.
    """
    return Rotation(model) if spec_of(model.config).family == "rotary" else None
