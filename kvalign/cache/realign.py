"""How the entries that stay get right for their new positions, as the cache sees it.

Positions run on for a while, a *frame*, before entries are moved back in it (`CacheSizes`):

- `Rotating`: rotary keys stay as they were written, since scores depend on differences of positions
  alone. The sinks are turned to follow; once in a long while all keys are turned back.
- `OnRead`: entries stay as `anchor` leaves them, without their position, and attention gives them
  the present one: nothing is written again.
- `FromBirth`: entries without their position are kept beside those that attention sees, which are
  placed anew from them: one rounding, however often an entry moves.
- `Recursive`: entries are moved from their own last output, as the paper's network needs it.
"""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.aligners import Aligner, Move, TableAligner
from kvalign.aligners.base import Birth, KeysValues
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import rotation_of
from kvalign.models.attention import REGISTERED, install
from kvalign.models.rope import Rotation

LONG_RUN = 256  # positions that rotary keys run on for, or the cache's size if that is more


class Realigner:
    """One instance serves all layers and has no state.

    Attributes:
        rotation: what turns the model's keys, if anything does.
    """

    moves = False
    """Whether entries are placed anew, from what `anchor` returned or from their last output."""
    recursive = False
    """Of those that move: `place` is given its own last output, in float32."""

    def __init__(self, rotation: Rotation | None = None):
        self.rotation = rotation

    def within(self, sizes: CacheSizes, context_len: int | None) -> "Realigner":
        """What does the same for a cache of these sizes where this one's frames are too short."""
        return self

    def from_birth(self) -> "Realigner":
        """What does the same by writing entries anew from their birth, wherever each one lies;
        UserError if there is no such thing.
        """
        return self

    def frame(self, sizes: CacheSizes, context_len: int | None) -> CacheSizes:
        """The sizes with the number of steps after which entries are moved back."""
        return sizes

    def anchor(
        self, layer: int, keys: Tensor, values: Tensor, birth: Birth, at: Birth
    ) -> KeysValues:
        """What is stored of new entries [B, H, S, D], which have the places `birth` in the cache
        and were computed at the positions `at`: the same, while positions do not run on.
        """
        return keys, values

    def place(self, layer: int, keys: Tensor, values: Tensor, move: Move) -> KeysValues:
        """The entries [B, H, S, D] after the sinks, from what was stored of them; only of those
        that move.
        """
        raise NotImplementedError(f"{type(self).__name__} moves nothing")


class Rotating(Realigner):
    """Xiao et al. 2024 turn every key to its place at each step; here the sinks alone turn."""

    rotation: Rotation

    def within(self, sizes: CacheSizes, context_len: int | None) -> Realigner:
        return self.from_birth() if is_short(self, sizes, context_len) else self

    def from_birth(self) -> Realigner:
        return Returning(self.rotation)

    def frame(self, sizes: CacheSizes, context_len: int | None) -> CacheSizes:
        return running(sizes, self.rotation, context_len)


class Returning(Rotating):
    """Keys are turned back to position 0 and from there to their place, at each step: one rounding
    where the context leaves no frame worth the name.
    """

    moves = True

    def within(self, sizes: CacheSizes, context_len: int | None) -> Realigner:
        return self

    def from_birth(self) -> Realigner:
        return self

    def frame(self, sizes: CacheSizes, context_len: int | None) -> CacheSizes:
        return replace(sizes, realign_every=1)

    def anchor(
        self, layer: int, keys: Tensor, values: Tensor, birth: Birth, at: Birth
    ) -> KeysValues:
        return self.rotation.shift(keys, _positions(at)), values

    def place(self, layer: int, keys: Tensor, values: Tensor, move: Move) -> KeysValues:
        return self.rotation.shift(keys, -move.now), values


class OnRead(Realigner):
    """Position tables, k = m[p] + s[p] k': with k' stored, a query's scores are
    (q k') s[p] + q m[p], and its output (w s[p]) v' + w m[p].

    Attributes:
        moving: what does the same by writing entries anew.
    """

    def __init__(self, model: PreTrainedModel, table: TableAligner):
        super().__init__(rotation_of(model))
        self.config, self.table = model.config, table.to(model.device)
        self.moving = FromBirth(model, table)
        self.step_means: list[Tensor] = []
        self._version = -1
        install(self.config)

    def within(self, sizes: CacheSizes, context_len: int | None) -> Realigner:
        return self.moving if self.rotation and is_short(self, sizes, context_len) else self

    def from_birth(self) -> Realigner:
        return self.moving

    def frame(self, sizes: CacheSizes, context_len: int | None) -> CacheSizes:
        return running(sizes, self.rotation, context_len) if self.rotation else sizes

    def anchor(
        self, layer: int, keys: Tensor, values: Tensor, birth: Birth, at: Birth
    ) -> KeysValues:
        """Of a rotary model the mean is turned to where the keys are, so that they stay there."""
        table = self.table
        if self.rotation is None:
            return table.anchor(layer, keys, values, birth)
        mean = self.rotation.shift(table.key[layer, :, birth], -_positions(at))  # [B?, H, S, D]
        keys = (keys - mean) / table.key_scale[layer, :, birth, None]
        return keys, table.anchor(layer, values, values, birth)[1]

    def read(self, layer: int, keys: Tensor, values: Tensor, now: Tensor, at: Tensor) -> KeysValues:
        """Entries [B, H, S, D] as attention sees them: at the places `now` [S], computed for the
        positions `at` [S].
        """
        table = self.table
        means = table.key[layer, :, now]
        if self.rotation is not None:
            means = self.rotation.shift(means, -at)
        return (
            torch.addcmul(means, keys, table.key_scale[layer, :, now, None]),
            torch.addcmul(
                table.value[layer, :, now], values, table.value_scale[layer, :, now, None]
            ),
        )

    def turned_means(self, layer: int) -> Tensor:
        """Mean keys [H, P, D] of a layer, of a rotary model turned to their positions."""
        means = self.table.key[layer]
        if self.rotation is None:
            return means
        return self.rotation.shift(means, -torch.arange(means.shape[1], device=means.device))

    def prepare(self, num_layers: int) -> None:
        """Have `turned_means` of all layers in `step_means`, those of the table as it is now."""
        if self._version != self.table.key._version:
            self.step_means = [self.turned_means(layer) for layer in range(num_layers)]
            self._version = self.table.key._version


class FromBirth(Realigner):
    """Keys of a rotary model are turned back to position 0 and from there to where they are; values
    carry no position. The aligner works between the two rotations.
    """

    moves = True

    def __init__(self, model: PreTrainedModel, aligner: Aligner):
        super().__init__(rotation_of(model))
        self.aligner = aligner.to(model.device)

    def anchor(
        self, layer: int, keys: Tensor, values: Tensor, birth: Birth, at: Birth
    ) -> KeysValues:
        if self.rotation is not None:
            keys = self.rotation.shift(keys, _positions(at))
        return self.aligner.anchor(layer, keys, values, birth)

    def place(self, layer: int, keys: Tensor, values: Tensor, move: Move) -> KeysValues:
        keys, values = self.aligner.realign(layer, keys, values, move)
        if self.rotation is not None:
            keys = self.rotation.shift(keys, -move.now)
        return keys, values


class Recursive(Realigner):
    """An aligner applied to its own output, after the rotation if there is one."""

    moves = recursive = True

    def __init__(self, model: PreTrainedModel, aligner: Aligner):
        super().__init__(rotation_of(model))
        self.aligner = aligner.to(model.device)

    def from_birth(self) -> Realigner:
        raise UserError(
            f"an aligner of kind {self.aligner.kind} moves entries that lie side by side, by the "
            "same shift: another policy than oldest needs one that places each from its birth "
            "(table, anchored)"
        )

    def place(self, layer: int, keys: Tensor, values: Tensor, move: Move) -> KeysValues:
        if self.rotation is not None:
            keys = self.rotation.shift(keys, move.shift)
        return self.aligner.realign(layer, keys, values, move)


def realigner_of(model: PreTrainedModel, aligner: Aligner | None = None) -> Realigner | None:
    """What keeps a model's entries right: without an aligner what StreamingLLM does, rotation where
    positions are rotary and nothing elsewhere.
    """
    if aligner is None:
        rotation = rotation_of(model)
        return Rotating(rotation) if rotation else None
    if isinstance(aligner, TableAligner) and model.config.model_type in REGISTERED:
        return OnRead(model, aligner)
    return Recursive(model, aligner) if aligner.recursive else FromBirth(model, aligner)


def running(sizes: CacheSizes, rotation: Rotation, context_len: int | None) -> CacheSizes:
    """The frame of keys that only differences of positions matter to: so long that turning all keys
    back costs less than an entry a step, and within the context length where that leaves room or
    the rotation changes beyond it. Small positions keep float32 angles exact.
    """
    run = max(sizes.cache_size, LONG_RUN)
    if context_len is not None:
        run = min(run, context_len - 1 - sizes.cache_size)
        if not rotation.is_bounded:
            run = max(run, sizes.cache_size // 4)
    return replace(sizes, realign_every=max(run, 1))


def is_short(realigner: Realigner, sizes: CacheSizes, context_len: int | None) -> bool:
    """Whether frames are so short that keys are turned, and in half precision rounded, more than a
    few times while they stay.
    """
    return realigner.frame(sizes, context_len).realign_every < sizes.cache_size // 4


def check_realign_every(sizes: CacheSizes, realigner: Realigner | None) -> None:
    """Raise UserError where it is not the sizes that say when entries are moved."""
    if sizes.realign_every > 1 and (realigner is None or realigner.frame(sizes, None) != sizes):
        raise UserError(
            f"realign_every must be 1 for a table on rotary keys, which moves nothing, "
            f"got {sizes.realign_every}"
        )


def _positions(at: Birth) -> Tensor:
    return torch.arange(at.start, at.stop) if isinstance(at, slice) else at
