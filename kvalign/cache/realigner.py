"""Realigners: they correct the entries of a cache for their new positions. One decides the stored
form of an entry, how it changes when it moves, and how attention reads it.

- `Realigner`: entries stay as they are, though their positions change.
- `Rotating`: rotary keys stay as they were written, since scores depend only on differences of
  positions. The sinks are rotated to follow. Positions run on for a while, a *frame*; then all keys
  are rotated back (`CacheSizes`).
- `FromBirth`: entries without their position are stored beside those that attention sees, which are
  computed anew from them. So an entry is rounded once, however often it moves.
- `Recursive`: entries are moved from the aligner's own last output, as the paper's network needs
  it.
- `OnRead`: entries stay as they were written, without their position, and attention adds it
  (`attention.py`).
"""

from dataclasses import asdict, replace
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.aligners import Aligner, Move, TableAligner
from kvalign.aligners.base import Birth, Flags
from kvalign.aligners.entries import KV
from kvalign.aligners.table import Tables, version_of
from kvalign.cache.attention import Reader
from kvalign.cache.sizes import CacheSizes, Frame
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import MOST
from kvalign.models.architectures import MASKED, REGISTERED, rotation_of, window_of
from kvalign.models.attention import install
from kvalign.models.rope import Rotation
from kvalign.models.wrapped import no_autograd_modes

LONG_RUN = 256  # positions that rotary keys run on for, or the cache's size if that is more

Strategy = Literal["keep", "move", "read"]
"""Way to keep entries right. `keep`: attention gets them as they were written. `move`: it gets
copies, computed again from the output of `anchor` when they move. `read`: they are stored in the
form of `anchor`, and `attend` places them.
"""


class Realigner:
    """Realigner that leaves entries unchanged. One instance serves all layers and has no state.

    Attributes:
        rotation: of the model's keys; None if they do not rotate.
        runs_on: whether keys keep their original positions; only differences matter.
        aligner: corrects entries when they move; None: nothing does.
        place_positions: [P] int64, the model's position of each place; None: they are the same.
        lift: rows by which entries rise in a table at the first eviction: positions, or to those
            of squeezed places.
    """

    strategy: Strategy = "keep"
    recursive = False
    """Whether the input of `place` is its own last output, in float32."""
    aligner: Aligner | None = None
    place_positions: Tensor | None = None
    lift = 0
    version: tuple[tuple[int, int], ...] = ()
    """Of what `refresh` computes: place and number of changes of each tensor that it is made of."""

    def __init__(self, rotation: Rotation | None = None):
        self.rotation = rotation
        self.runs_on = rotation is not None and self.strategy != "move"

    @property
    def stores_bare(self) -> bool:
        """Return whether the output of `anchor` is that of `from_birth`."""
        return self.strategy == "read" and self.rotation is None

    def within(self, sizes: CacheSizes, context_len: int | None) -> "Realigner":
        """Return a realigner for these sizes, whose frames may be too short for this one."""
        return self

    def from_birth(self) -> "Realigner":
        """Return a realigner that rewrites entries from their original form, for any position;
        UserError if there is none.
        """
        return self

    def frame(self, sizes: CacheSizes, context_len: int | None) -> CacheSizes:
        """The sizes, with the number of steps after which entries are moved back."""
        return sizes

    def lifted(self, sizes: CacheSizes, context_len: int | None, table: Aligner) -> CacheSizes:
        """Frame in which entries rise by `lift`, as far as there are rows; not where each entry is
        placed by itself.
        """
        num_rows = min(context_len or MOST, table.config.chunk_len)
        if self.place_positions is not None:
            num_rows = len(self.place_positions)
        lift = min(self.lift, num_rows - 1 - sizes.last_position)
        return Frame(**asdict(sizes), lift=lift) if lift > 0 and lifts(sizes) else sizes

    def refresh(self) -> None:
        """Take what attention reads of the aligner as it is now, before a pass begins."""

    def anchor(
        self, layer: int, new: KV, birth: Birth, written: Birth, evicting: Flags = False
    ) -> KV:
        """Return the stored form of new entries [B, H, S, D] with the places `birth`, computed at
        the positions `written`, which are equal unless positions run on; `evicting` as of an
        aligner.
        """
        return new

    def place(self, layer: int, stored: KV, move: Move) -> KV:
        """Entries [B, H, S, D] after the sinks at new positions, from their stored form: as they
        are, but for the rotation of keys.
        """
        return rotated(self.rotation, layer, stored, move.shift)

    def place_without_rotation(self, layer: int, stored: KV, move: Move) -> KV:
        """Same, without the rotation."""
        return stored

    def read(self, layer: int, stored: KV, now: Tensor, at: Tensor) -> KV:
        """Stored entries [B, H, S, D] as attention sees them: in the slots `now` [S], for the
        positions `at` [S].
        """
        return stored

    def reader(self, layer: int) -> Reader:
        """All by which attention reads the entries of a layer."""
        return Reader(self.rotation and self.rotation.at(layer))


class Rotating(Realigner):
    """Rotation of the sinks at each step. Xiao et al. 2024 rotate every key instead."""

    rotation: Rotation

    def within(self, sizes: CacheSizes, context_len: int | None) -> Realigner:
        return self.from_birth() if is_short(self, sizes, context_len) else self

    def from_birth(self) -> Realigner:
        return FromBirth(self.rotation)

    def frame(self, sizes: CacheSizes, context_len: int | None) -> CacheSizes:
        return running(sizes, self.rotation, context_len)


class FromBirth(Realigner):
    """Realignment from the original form. Keys of a rotary model are rotated back to position 0,
    and from there to their present position; values carry no position. The aligner works between
    the two rotations. Without one each key is still rounded once: for a context length that leaves
    `Rotating` no frame worth the name.
    """

    strategy = "move"

    def __init__(self, rotation: Rotation | None, aligner: Aligner | None = None):
        super().__init__(rotation)
        self.aligner = aligner

    def frame(self, sizes: CacheSizes, context_len: int | None) -> CacheSizes:
        if self.aligner is None:
            return replace(sizes, realign_every=1)
        return self.lifted(sizes, context_len, self.aligner)

    def anchor(
        self, layer: int, new: KV, birth: Birth, written: Birth, evicting: Flags = False
    ) -> KV:
        unrotated = rotated(self.rotation, layer, new, positions_of(written))
        return self.aligner.anchor(layer, unrotated, birth, evicting) if self.aligner else unrotated

    def place_without_rotation(self, layer: int, stored: KV, move: Move) -> KV:
        return self.aligner.realign(layer, stored, move) if self.aligner else stored

    def place(self, layer: int, stored: KV, move: Move) -> KV:
        placed = self.place_without_rotation(layer, stored, move)
        return rotated(self.rotation, layer, placed, -move.now)


class Recursive(Realigner):
    """Aligner that is applied to its own output, after the rotation if there is one."""

    strategy, recursive = "move", True
    aligner: Aligner

    def __init__(self, rotation: Rotation | None, aligner: Aligner):
        super().__init__(rotation)
        self.aligner = aligner

    def from_birth(self) -> Realigner:
        raise UserError(
            f"an aligner of kind {self.aligner.kind} moves all entries by one shift: policies "
            "other than oldest, and a memory, need one that places each entry by itself (table, "
            "table-network)"
        )

    def place(self, layer: int, stored: KV, move: Move) -> KV:
        return self.aligner.realign(layer, rotated(self.rotation, layer, stored, move.shift), move)


class OnRead(Realigner):
    """Tables on architectures whose attention is a function in transformers' registry.

    Args:
        moving: gives the same result by rewriting entries.
    """

    strategy = "read"

    def __init__(self, model: PreTrainedModel, table: TableAligner, moving: Realigner):
        super().__init__(rotation_of(model))
        self.config, self.table, self.moving = model.config, table.to(model.device), moving
        self.place_positions, self.lift = moving.place_positions, moving.lift
        self._readers: list[Reader] = []
        install(self.config)

    def within(self, sizes: CacheSizes, context_len: int | None) -> Realigner:
        window = window_of(self.config)
        if window is not None and window <= sizes.cache_size:
            return self.moving  # which leaves it to the model what a layer sees
        return self.moving if self.rotation and is_short(self, sizes, context_len) else self

    def from_birth(self) -> Realigner:
        return self.moving

    def frame(self, sizes: CacheSizes, context_len: int | None) -> CacheSizes:
        if self.rotation is not None:
            return running(sizes, self.rotation, context_len)
        return self.lifted(sizes, context_len, self.table)

    def refresh(self) -> None:
        """Take the tables of all layers as they are now."""
        install(self.config)
        if self.version != (version := version_of(self.table)):
            with no_autograd_modes():
                self._readers = [*map(self._reader_of, range(len(self.table.key)))]
            self.version = version

    def anchor(
        self, layer: int, new: KV, birth: Birth, written: Birth, evicting: Flags = False
    ) -> KV:
        """Return the entries to store. On a rotary model the mean is rotated to the position of the
        keys, which stay there.
        """
        table = self.table
        if self.rotation is None:
            return table.anchor(layer, new, birth, evicting)
        mean = table.key[layer, :, birth]  # [H, S, D], or [B, H, S, D] once it is rotated
        mean = self.rotation.at(layer).shift(mean, -positions_of(written))
        keys = (new.keys - mean) / table.key_scale[layer, :, birth, None]
        return KV(keys, table.anchor(layer, new, birth).values)

    def read(self, layer: int, stored: KV, now: Tensor, at: Tensor) -> KV:
        table = self.table
        means = table.key[layer, :, now]
        if self.rotation is not None:
            means = self.rotation.at(layer).shift(means, -at)
        values = table.value[layer, :, now]
        return KV(
            torch.addcmul(means, stored.keys, table.key_scale[layer, :, now, None]),
            torch.addcmul(values, stored.values, table.value_scale[layer, :, now, None]),
        )

    def reader(self, layer: int) -> Reader:
        """Tables as `refresh` found them, mean keys rotated to their places; or as they are now, if
        gradients are recorded.
        """
        return self._reader_of(layer) if torch.is_grad_enabled() else self._readers[layer]

    def _reader_of(self, layer: int) -> Reader:
        table, means = self.table, self.table.key[layer]
        rotation = self.rotation and self.rotation.at(layer)
        if rotation is not None:
            means = rotation.shift(means, -torch.arange(means.shape[1], device=means.device))
        scales = table.key_scale[layer], table.value_scale[layer]
        return Reader(rotation, Tables(means, table.value[layer], *scales), table.network_of(layer))


@no_autograd_modes()
def realigner_of(
    model: PreTrainedModel, aligner: Aligner | None = None, sizes: CacheSizes | None = None
) -> Realigner | None:
    """Return the realigner for a model's entries. Without an aligner it is StreamingLLM's: rotation
    for rotary positions and nothing elsewhere. With tables on learned positions the window of a
    cache of these sizes lies where the aligner was measured as best.
    """
    rotation = rotation_of(model)
    if aligner is None:
        return Rotating(rotation) if rotation else None
    aligner = aligner.to(model.device)
    if not isinstance(aligner, TableAligner):
        return Recursive(rotation, aligner) if aligner.recursive else FromBirth(rotation, aligner)
    positions, lift = None, 0
    if rotation is None and sizes is not None:
        lift = aligner.config.position_at(sizes.cache_size) - sizes.cache_size
        aligner, positions = aligner.squeezed(sizes.cache_size, later=lifts(sizes))
        lift = aligner.config.chunk_len if lift < 0 else lift
    moving = FromBirth(rotation, aligner)
    moving.place_positions, moving.lift = positions, lift
    return OnRead(model, aligner, moving) if model.config.model_type in REGISTERED else moving


def lifts(sizes: CacheSizes) -> bool:
    """Return whether all entries of a cache can rise together: a memory, and policies, place each
    by itself.
    """
    return sizes.is_oldest and not sizes.memory


def rotated(rotation: Rotation | None, layer: int, entries: KV, shift: int | Tensor) -> KV:
    """Entries [B, H, S, D] with keys rotated so many positions, [..., S], towards the start."""
    if rotation is None:
        return entries
    return KV(rotation.at(layer).shift(entries.keys, shift), entries.values)


def running(sizes: CacheSizes, rotation: Rotation, context_len: int | None) -> CacheSizes:
    """Frame of keys for which only differences of positions matter. It is so long that rotating all
    keys back costs less than one entry per step. It stays within the context length if that leaves
    room, or if the rotation changes beyond it. Small positions keep float32 angles exact.
    """
    run = max(sizes.cache_size, LONG_RUN)
    if context_len is not None:
        run = min(run, context_len - 1 - sizes.cache_size)
        if not rotation.is_bounded:
            run = max(run, sizes.cache_size // 4)
    return replace(sizes, realign_every=max(run, 1))


def is_short(realigner: Realigner, sizes: CacheSizes, context_len: int | None) -> bool:
    """Return whether frames are so short that a key is rotated, and in half precision rounded, more
    than a few times in its life.
    """
    return realigner.frame(sizes, context_len).realign_every < sizes.cache_size // 4


def is_exact(model: PreTrainedModel, cache_size: int, realigner: Realigner | None) -> bool:
    """Return whether segments (`Pass`) give the same result as decode steps."""
    if model.config.model_type not in REGISTERED + MASKED:
        return False
    window = window_of(model.config)
    if window is not None and window <= cache_size:
        return False
    return realigner is None or realigner.aligner is None


def positions_of(at: Birth) -> int | Tensor:
    """Positions [S] of a slice or a tensor; of one entry a number."""
    if not isinstance(at, slice):
        return at
    return at.start if at.stop == at.start + 1 else torch.arange(at.start, at.stop)
