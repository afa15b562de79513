"""Realigners that rewrite entries, and the choice of a realigner for a model.

- `Rotating`: rotary keys stay as they were written, since scores depend only on differences of
  positions. The sinks are rotated to follow. Rarely, all keys are rotated back.
- `FromBirth`: entries without their position are stored beside those that attention sees, which are
  computed anew from them. So an entry is rounded once, however often it moves.
- `Recursive`: entries are moved from the aligner's own last output, as the paper's network needs
  it.
- `OnRead` (`on_read.py`): entries stay without their position, and attention adds it.
"""

from dataclasses import replace

from transformers import PreTrainedModel

from kvalign.aligners import Aligner, Move, TableAligner
from kvalign.aligners.base import Birth, Flags
from kvalign.aligners.entries import KV
from kvalign.cache.on_read import OnRead
from kvalign.cache.realigner import Realigner, is_short, positions_of, rotated, running
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.autograd import no_autograd_modes
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import REGISTERED, rotation_of
from kvalign.models.rope import Rotation


class Rotating(Realigner):
    """Rotation of the sinks at each step. Xiao et al. 2024 rotate every key instead."""

    rotation: Rotation

    def within(self, sizes: CacheSizes, context_len: int | None) -> Realigner:
        return self.from_birth() if is_short(self, sizes, context_len) else self

    def from_birth(self) -> Realigner:
        return Returning(self.rotation)

    def frame(self, sizes: CacheSizes, context_len: int | None) -> CacheSizes:
        return running(sizes, self.rotation, context_len)

    def place(self, layer: int, stored: KV, move: Move) -> KV:
        return rotated(self.rotation, layer, stored, move.shift)


class Returning(Realigner):
    """Rotation of all keys at each step: back to position 0 and from there to their present
    position. Each key is rounded once. For a context length that leaves no frame worth the name.
    """

    strategy = "move"
    rotation: Rotation

    def frame(self, sizes: CacheSizes, context_len: int | None) -> CacheSizes:
        return replace(sizes, realign_every=1)

    def anchor(self, layer: int, new: KV, birth: Birth, at: Birth, evicting: Flags = False) -> KV:
        return rotated(self.rotation, layer, new, positions_of(at))

    def place(self, layer: int, stored: KV, move: Move) -> KV:
        return rotated(self.rotation, layer, stored, -move.now)


class FromBirth(Realigner):
    """Realignment from the original form. Keys of a rotary model are rotated back to position 0,
    and from there to their present position; values carry no position. The aligner works between
    the two rotations.
    """

    strategy = "move"
    aligner: Aligner

    def __init__(self, model: PreTrainedModel, aligner: Aligner):
        super().__init__(rotation_of(model))
        self.aligner = aligner.to(model.device)

    def anchor(self, layer: int, new: KV, birth: Birth, at: Birth, evicting: Flags = False) -> KV:
        unrotated = rotated(self.rotation, layer, new, positions_of(at))
        return self.aligner.anchor(layer, unrotated, birth, evicting)

    def place_without_rotation(self, layer: int, stored: KV, move: Move) -> KV:
        return self.aligner.realign(layer, stored, move)

    def place(self, layer: int, stored: KV, move: Move) -> KV:
        placed = self.place_without_rotation(layer, stored, move)
        return rotated(self.rotation, layer, placed, -move.now)


class Recursive(Realigner):
    """Aligner that is applied to its own output, after the rotation if there is one."""

    strategy, recursive = "move", True
    aligner: Aligner

    def __init__(self, model: PreTrainedModel, aligner: Aligner):
        super().__init__(rotation_of(model))
        self.aligner = aligner.to(model.device)

    def from_birth(self) -> Realigner:
        raise UserError(
            f"an aligner of kind {self.aligner.kind} moves all entries by one shift: policies "
            "other than oldest, and a memory, need one that places each entry by itself (table, "
            "anchored)"
        )

    def place(self, layer: int, stored: KV, move: Move) -> KV:
        return self.aligner.realign(layer, rotated(self.rotation, layer, stored, move.shift), move)


@no_autograd_modes()
def realigner_of(
    model: PreTrainedModel, aligner: Aligner | None = None, cache_size: int = 0
) -> Realigner | None:
    """Return the realigner for a model's entries. Without an aligner it is StreamingLLM's: rotation
    for rotary positions and nothing elsewhere. With tables, places may be squeezed.
    """
    if aligner is None:
        rotation = rotation_of(model)
        return Rotating(rotation) if rotation else None
    if not isinstance(aligner, TableAligner):
        return Recursive(model, aligner) if aligner.recursive else FromBirth(model, aligner)
    aligner, positions = aligner.to(model.device).squeezed(cache_size)
    moving = FromBirth(model, aligner)
    moving.place_positions = positions
    return OnRead(model, aligner, moving) if model.config.model_type in REGISTERED else moving
