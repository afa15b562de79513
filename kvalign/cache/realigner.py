"""Interface of realigners for a cache and its layers: they correct entries for their new positions.

Positions run on for a while, a *frame*, before entries are moved back in it (`CacheSizes`). A
realigner decides the stored form of an entry, how it changes when it moves, and how attention reads
it. `realign.py` has the realigners that change anything.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.aligners import Aligner, Move
from kvalign.aligners.base import Birth, Flags
from kvalign.aligners.entries import KV
from kvalign.cache.attention import Reader
from kvalign.cache.passes import Pass
from kvalign.cache.sizes import CacheSizes
from kvalign.models.architectures import MASKED, REGISTERED, window_of
from kvalign.models.rope import Rotation

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
    """

    strategy: Strategy = "keep"
    recursive = False
    """Whether the input of `place` is its own last output, in float32."""
    aligner: Aligner | None = None
    place_positions: Tensor | None = None
    version: tuple[tuple[int, int], ...] = ()
    """Of what `prepare` computes: place and number of changes of each tensor that it is made of."""

    def __init__(self, rotation: Rotation | None = None):
        self.rotation = rotation
        self.runs_on = rotation is not None and self.strategy != "move"

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

    def prepare(self) -> None:
        """Prepare what attention reads before a pass begins."""

    def anchor(self, layer: int, new: KV, birth: Birth, at: Birth, evicting: Flags = False) -> KV:
        """Return the stored form of new entries [B, H, S, D] with the places `birth`, computed at
        the positions `at`, which are equal unless positions run on (`evicting`: `Aligner.anchor`).
        """
        return new

    def write(self, step: Pass, layer: int, ring: KV, new: KV) -> bool:
        """Write the entries [B, H, 1, D] of a usual pass into a ring by our kernel, where it can;
        return whether it did.
        """
        return False

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


def rotated(rotation: Rotation | None, layer: int, entries: KV, shift: int | Tensor) -> KV:
    """Entries with their keys rotated so many positions towards the start, if keys rotate."""
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
    """Return whether segments (`segments.py`) give the same result as decode steps."""
    if model.config.model_type not in REGISTERED + MASKED:
        return False
    window = window_of(model.config)
    if window is not None and window <= cache_size:
        return False
    return realigner is None or realigner.aligner is None


def positions_of(at: Birth) -> int | Tensor:
    """Positions from a slice or a tensor; of one entry from a number."""
    if not isinstance(at, slice):
        return at
    return at.start if at.stop == at.start + 1 else torch.arange(at.start, at.stop)
