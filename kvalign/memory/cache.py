"""Streaming cache whose window passes evicted entries to a memory."""

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor
from transformers import PretrainedConfig

from kvalign.aligners import TableAligner
from kvalign.aligners.entries import KV
from kvalign.cache.edits import CachePart
from kvalign.cache.realigner import Realigner
from kvalign.cache.recall_layers import layers_asked
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.step import Step
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.cache.window_layer import WindowLayer
from kvalign.foundation.errors import UserError
from kvalign.foundation.memory import check_room
from kvalign.memory.layer import MemoryLayer
from kvalign.memory.memory import TOGETHER
from kvalign.memory.recall import Recalls
from kvalign.memory.recall_places import RecallPlaces
from kvalign.models.architectures import ModelSpec, window_of
from kvalign.models.attention import REGISTERED, install
from kvalign.models.key_bases import KeyBases
from kvalign.models.rope import RotationByLayer

_OF_LAYER = 0x5851F42D4C957F2D  # a factor of Knuth's for numbers of 64 bits


@final
class MemoryCache(StreamingCache):
    """Sinks, a window and a memory.

    Args:
        spec, sizes: see `FixedSizeCache`.
        realigner: keeps the kept entries right; it must place them from their original form.
        config: of the model, whose attention passes on its queries.
        num_positions: number of possible original positions.
        grows: whether memories grow with their contents (see `Memory`).
        bases: see `FixedSizeCache`.

    Attributes:
        asking: the layers that take evicted entries back; the others keep their whole window.

    Raises:
        UserError: as of `FixedSizeCache`; a realigner or a model that does not fit.
    """

    def __init__(
        self,
        spec: ModelSpec,
        sizes: CacheSizes,
        realigner: Realigner | None,
        config: PretrainedConfig,
        num_positions: int | None,
        grows: bool = True,
        bases: KeyBases | None = None,
    ):
        name = spec.name or "this model"
        if spec.model_type not in REGISTERED:
            raise UserError(
                f"memory does not work with {name}: {spec.model_type} models do not expose their "
                "queries"
            )
        if realigner is None:
            raise UserError(
                f"memory needs an aligner on {name}, which places the entries that are taken "
                "back: use method kvalign"
            )
        seen_at_most = window_of(config)
        if seen_at_most is not None and seen_at_most <= sizes.cache_size:
            raise UserError(
                f"memory does not work with {name} at cache_size {sizes.cache_size}: its layers "
                "see "
                f"{seen_at_most} entries"
            )
        if isinstance(realigner.rotation, RotationByLayer):
            raise UserError(f"memory does not work with {name}: its layers rotate keys differently")
        if sizes.realign_every > 1:
            raise UserError(
                "memory needs realign_every 1, since each step places all entries, got "
                f"{sizes.realign_every}"
            )
        assert num_positions is not None
        is_free = realigner.rotation is not None
        by_age = sizes.recall_places == "age" if sizes.recall_places else is_free
        born, places = realigner.from_birth(), RecallPlaces(sizes, num_positions, by_age, is_free)
        if by_age and not is_free and not isinstance(born.aligner, TableAligner):
            raise UserError("recall_places=age on learned positions needs a table: use rank")
        self.recalls, self.grows = Recalls(sizes, born, places), grows
        self._num_pending = 0  # tokens fed one by one that are not in the memories yet
        super().__init__(spec, sizes, realigner, bases, config)
        if not is_free:
            self.frame = places.frame
        install(config)

    def _make_layers(self, spec: ModelSpec) -> list[WindowLayer]:
        layers = super()._make_layers(spec)
        asked = layers_asked(self.sizes.recall_layers, spec.attention)
        of_all = self.sinks, self.sizes, self.recalls, self.grows
        self.asking = [MemoryLayer(self, i, *of_all) for i in sorted(asked)]
        others = [layer for layer in layers if layer.layer_idx not in asked]
        return sorted([*self.asking, *others], key=lambda layer: layer.layer_idx)

    @property
    def _asks_for_places(self) -> bool:
        return True

    @property
    def room(self) -> int:
        """Tokens that a call may have: one once any is lost, as each token takes back its own."""
        return 1 if self.sizes.num_dropped(max(self.seen, default=0)) else super().room

    def _prepare_entries(self, step: Step) -> Step:
        if not step.is_single or self._num_pending >= min(TOGETHER, self.sizes.num_in_sight):
            self._put_aside()
        self.recalls.begin(step, [n - self._num_pending for n in step.seen])
        if asking := self.recalls.of_step:
            for memory in (layer.memory for layer in self.asking):
                memory.prepare(asking)
        return super()._prepare_entries(step)

    @property
    def is_usual(self) -> bool:
        asking = self.recalls.of_step
        return super().is_usual and asking is not None and asking.finds_all

    def _put_aside(self) -> None:
        """Move the entries that single steps have added to the window into the memories. A group at
        once costs less than one by one, and none is lost before.
        """
        if num := self._num_pending:
            before = [n - num for n in self.seen]
            firsts = [n - moved for n, moved in zip(before, self._moved, strict=True)]
            at = torch.tensor(firsts)[:, None, None] + torch.arange(num)
            for layer in self.asking:
                layer.put_aside(before, num, at.to(layer.device))
        self._num_pending = 0

    def _end(self, step: Step) -> None:
        if step.is_single:
            self._num_pending += 1
        self.recalls.end()
        super()._end(step)

    @property
    def kept(self) -> CacheSizes:
        sizes = self.sizes
        return replace(sizes, cache_size=sizes.num_sinks + sizes.num_in_sight + sizes.memory)

    def check_editable(self) -> None:
        super().check_editable()
        if len(self.asking) < len(self.attention):
            raise UserError(
                "a stream whose memory is in some layers only cannot be edited: the others could "
                "not fill their windows"
            )

    def part(self, first: int, stop: int) -> CachePart:
        """Entries as of the base, those of the memory included."""
        part = super().part(first, stop)
        return replace(part, before=self.seen[0] - self.num_kept)

    def _taken(
        self, layer: WindowLayer, i: int, pieces: Sequence[CachePart], seen: int
    ) -> list[KV]:
        behind, num_sinks = self.frame.num_behind(seen), self.sizes.num_sinks
        num = self.sizes.num_stored(seen) - num_sinks
        return self.asking[i].recollect(i, pieces, max(num, 0), num_sinks + behind)

    def state(self) -> dict[str, Tensor]:
        """State as of the base, with digests of the entries of each slot in all layers, [B, S]
        int64: equal ones are of equal entries.
        """
        tensors = super().state()
        if not tensors:
            return tensors
        num = self.asking[0].memory.used(self.seen)
        digests = torch.zeros(len(self.seen), num, dtype=torch.int64)
        for layer in self.asking:  # no layer counts as another does
            digests = digests * _OF_LAYER + layer.memory.digests[:, :num]
        return tensors | {"digests": digests}

    def reset(self) -> None:
        self._num_pending = 0
        super().reset()

    def fill(self, rng: torch.Generator) -> None:
        """Fill the memories with random entries, as if their tokens had been fed after the others.

        A step then takes as long as with real entries. This is for measuring time, and needs a full
        window.

        Raises:
            UserError: they do not fit into the free memory.
        """
        self.settle()
        first, period = self.asking[0], self.frame.move_size
        num = -(-first.memory.most // period) * period  # that leaves every position what it is
        one = first.memory.form.decode(first.memory.held.keys[:, :, :1])
        what = f"the entries of a memory of {self.sizes.memory} tokens"
        of_slot = first.memory.nbytes // first.memory.num_slots
        check_room(of_slot * num * len(self.asking), what)
        shape = (*one.shape[:2], num, one.shape[3])
        for layer in self.asking:
            new = (torch.randn(shape, generator=rng, dtype=torch.float32).to(one) for _ in range(2))
            layer.memory.write(self.seen, KV(*new))
        self._hold([n + num for n in self.seen])  # with the window as it is
