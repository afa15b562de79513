"""Socket for a memory, a guest of the streaming cache: what leaves the windows goes in, and the
queries of a pass take some of it back. The cache imports none; `kvalign.memory` is one.
"""

from abc import abstractmethod
from collections.abc import Collection, Sequence

from torch import Tensor

from kvalign.aligners.entries import KV
from kvalign.cache.edits import EntryPart
from kvalign.cache.form import ReadTensor
from kvalign.cache.layer import Part
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.step import Step
from kvalign.cache.window_layer import WindowLayer


class CacheMemory(Part):
    """Memory behind the windows of a cache's layers, with the same rows.

    Attributes:
        kept_sizes: the cache's sizes, if the memory's entries were its own.
        frame: the sizes by which positions run; None: the realigner's.
    """

    kept_sizes: CacheSizes
    frame: CacheSizes | None

    @abstractmethod
    def begin(self, step: Step, layers: Sequence[WindowLayer], num_moved: Sequence[int]) -> None:
        """A pass begins. Entries still lie where the last pass left them, in rows that have been
        moved by so many positions.
        """

    @abstractmethod
    def take(self, layer: WindowLayer, step: Step, new: KV, entries: KV) -> KV:
        """Take in new entries [B, H, T, D] of a layer. Return what its attention sees: the
        entries of its window, with a mark on the keys that takes others back (`mark`).
        """

    @property
    @abstractmethod
    def finds_all(self) -> bool:
        """Return whether the queries of this pass, in all layers, find as much as a memory gives
        them.
        """

    @abstractmethod
    def end(self, step: Step) -> None:
        """The pass has ended."""

    @abstractmethod
    def reset(self) -> None:
        """Let go of all entries."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Tensors of all layers, by name."""

    @abstractmethod
    def begin_restore(self, state: Collection[str]) -> None:
        """A state with tensors of these names is about to be restored."""

    @abstractmethod
    def restore(self, layer: WindowLayer, read: ReadTensor, seen: list[int], head_dim: int) -> None:
        """Restore `state` of a layer, of rows that have been fed so many tokens."""

    @abstractmethod
    def check_editable(self) -> None:
        """Raise UserError unless entries can be moved to any place."""

    @abstractmethod
    def take_parts(
        self, layer: WindowLayer, i: int, parts: Sequence[EntryPart], seen: int
    ) -> list[KV]:
        """Have the entries of these parts alone behind a layer, the i-th with attention, in rows
        of so many tokens; return those for its rings, as `edits.ring_entries` does.
        """
