"""Memories behind the windows of a cache: what they take in, and what the queries of a pass take
back.

     places  0 1 2 3 | 4 ... R+3  | R+4 ... C-1 | C
             sinks   | taken back | window      | new

What is taken back replaces the window's oldest entries, in the order of time. So a step sees as
many entries as without a memory, and computes its token at the same position.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Self, final

import torch
from torch import Tensor
from transformers import PretrainedConfig

from kvalign.aligners.entries import KV, cat
from kvalign.cache.attention import Recalled, Recaller
from kvalign.cache.edits import CachePart, EntryPart, as_sinks, bare, in_window
from kvalign.cache.layer import Part, ReadTensor
from kvalign.cache.memory_sizes import layer_bias_of
from kvalign.cache.passes import COUNTS, HOST, Pass, Sight
from kvalign.cache.realigner import Realigner
from kvalign.cache.saving import read_kv
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.window_layer import WindowLayer
from kvalign.foundation.errors import UserError
from kvalign.foundation.machine import has_room, is_on_card
from kvalign.memory.memory import TOGETHER, Memory, most_slots
from kvalign.memory.recall import Matches, Recall
from kvalign.memory.recall_places import RecallPlaces
from kvalign.models.architectures import REGISTERED, ModelSpec, window_of
from kvalign.models.attention import install
from kvalign.models.rope import RotationByLayer

_OF_LAYER = 0x5851F42D4C957F2D  # a factor of Knuth's for numbers of 64 bits


@final
class Memories(Part):
    """Memories behind the windows of a cache's layers, one of each, with the same rows.

    Args:
        spec, sizes: of the cache.
        realigner: of the cache, which must place entries from their original form; None: it has
            none.
        config: of the model, whose attention passes on its queries.
        num_positions: number of possible original positions.
        grows: whether memories grow with their contents (see `Memory`).

    Attributes:
        of: by number of the layer; there are none before the first entries.
        kept_sizes: the cache's sizes, if the memory's entries were its own.
        frame: the sizes by which positions run; None: the realigner's.
        watched: takes the matches of each layer's queries; None: nobody asks for them.

    Raises:
        UserError: a realigner or a model that does not fit.
    """

    def __init__(
        self,
        spec: ModelSpec,
        sizes: CacheSizes,
        realigner: Realigner | None,
        config: PretrainedConfig,
        num_positions: int | None,
        grows: bool = True,
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
        placer, places = realigner.from_birth(), RecallPlaces(sizes, num_positions, by_age, is_free)
        self.sizes, self.grows = sizes, grows
        self.frame = None if is_free else places.frame
        self.kept_sizes = replace(
            sizes, cache_size=sizes.num_sinks + sizes.num_in_sight + sizes.memory
        )
        self._attention, self._storing = spec.attention, {*spec.attention}
        layer_bias = layer_bias_of(sizes.recall_layers, spec.attention)
        self.recall = Recall(sizes, placer, places, layer_bias)
        self.of: dict[int, Memory] = {}
        self._is_beside: bool | None = None
        self.watched: list[Matches] | None = None
        install(config)

    @property
    def _first(self) -> Memory | None:
        return next(iter(self.of.values()), None)

    def begin(self, step: Pass, layers: Sequence[WindowLayer], num_moved: Sequence[int]) -> None:
        """A pass begins. Entries still lie where the last pass left them, in rows that have been
        moved by so many positions.
        """
        if (first := self._first) is not None:
            seen = first.seen
            num = step.seen[0] - seen[0]  # single tokens that are only in the window as yet
            if num and (not step.is_single or num >= min(TOGETHER, self.sizes.num_in_sight)):
                positions = torch.tensor([n - by for n, by in zip(seen, num_moved, strict=True)])
                at = positions[:, None, None] + torch.arange(num)
                for layer in layers:
                    if layer.layer_idx in self.of:
                        self._put_newest(layer, seen, num, at.to(layer.device))
        step.counts[COUNTS.index("remembered")] = torch.tensor(
            step.seen if first is None else first.seen
        )

    def prepare(self, step: Pass) -> None:
        """Prepare what a pass of one token a row asks for: for a step that is compiled."""
        if (sight := self._last_sight(step)).has_lost:
            batch = self.recall.batch_of(step, sight)
            if self._first is not None and self._first.sketch is not None:
                self.recall.prepare()
            for i in self.of.keys() & self.recall.layer_bias.keys():
                self.of[i].prepare(batch)

    def _last_sight(self, step: Pass) -> Sight:
        return step.sights(self.sizes.num_recalled or 0)[-1]

    def _put_newest(self, layer: WindowLayer, seen: list[int], num: int, at: Tensor) -> None:
        """Take in the window's newest entries: those of `num` tokens of each row after `seen`, at
        the positions `at` [B, 1, num]. A group at once costs less than one by one, and none is lost
        before.
        """
        memory, realigner = self.of[layer.layer_idx], layer.realigner
        entries = layer.newest(layer.sources, num)
        if memory.form.is_int8:  # they are stored bare, and there without a position
            memory.put(seen, entries)
            return
        if realigner.runs_on:
            assert realigner.rotation is not None
            entries = KV(realigner.rotation.shift(entries.keys, at), entries.values)
        memory.write(seen, entries)

    def take(
        self, layer: WindowLayer, step: Pass, new: KV, anchored: KV | None = None
    ) -> Recaller | None:
        """Take in new entries [B, H, T, D] of a layer, of a segment in its frame; `anchored` as the
        layer's realigner stores them. Return what says what its queries take back; None: nothing.
        """
        if layer.layer_idx not in self._storing:
            return None
        # 1. Single tokens are taken in some time later; others at once, if no query will ask.
        memory, waiting = self._of_layer(layer), None
        is_asked = (step.is_single or step.is_segment) and not self.finds_none(step)
        is_asked = is_asked and layer.layer_idx in self.recall.layer_bias
        if not step.is_single:
            if anchored is None or not layer.realigner.stores_bare:
                anchored = layer.without_position(step, new, self.recall.placer)
            if is_asked:
                memory.seen, waiting = [*step.seen], anchored
            else:
                memory.write(step.seen, anchored)
        # 2. The rest is for its queries to say.
        return partial(self._recall, layer.layer_idx, step, waiting) if is_asked else None

    def _of_layer(self, layer: WindowLayer) -> Memory:
        if layer.layer_idx not in self.of:
            like, form = layer.entries.like(), layer.entries.form.without_position()
            if self._is_beside is None:
                one = like.map(lambda x: form.empty(x, 1))
                num_slots = len(self._storing) * most_slots(self.sizes)
                num_bytes = num_slots * (one.keys.nbytes + one.values.nbytes)
                self._is_beside = is_on_card(layer.device) and has_room(layer.device, 2 * num_bytes)
            # What has found room on a card is allocated at once, so that it has it later, too.
            device = layer.device if self._is_beside else HOST
            is_searched = layer.layer_idx in self.recall.layer_bias
            grows = self.grows and not self._is_beside
            # So that no step puts the pages of many layers in order.
            patience = TOGETHER * (layer.layer_idx % 16)
            self.of[layer.layer_idx] = Memory(
                like, form, self.recall.places, device, is_searched, patience, grows
            )
        return self.of[layer.layer_idx]

    def _recall(
        self, layer: int, step: Pass, waiting: KV | None, sight: Sight, query: Tensor
    ) -> Recalled:
        """Return what the scaled queries [B, H, G, T, D] of a sight take back, each as it would
        alone; of a segment, whose entries are waiting, once those up to there are taken in.
        """
        memory = self.of[layer]
        if waiting is not None:
            first = memory.seen[0] - step.seen[0]
            memory.write(memory.seen, waiting.slots(first, sight.queries.stop - first))
        batch = self.recall.batch_of(step, sight)
        placing = None if memory.sketch is None else self.recall.placing(layer, query, batch)
        if placing is None or self.watched is not None:
            queries = self.recall.rotate_queries(query.float(), batch)
            matches = memory.find(queries, batch)
            if self.watched is not None:
                self.watched.append(matches)
            if placing is None:
                return self.recall.as_seen(layer, queries, batch, matches)
        return memory.see(query, batch, placing)

    @property
    def is_on_card(self) -> bool:
        """Return whether they lie on a card, all alike; true before the first entries."""
        return self._first is None or self._first.device != HOST

    def finds_all(self, step: Pass) -> bool:
        """Return whether the queries of one token a row, in all layers, find as much as a memory
        gives them.
        """
        return (
            self._first is not None
            and (sight := self._last_sight(step)).has_lost
            and self._first.prepare(self.recall.batch_of(step, sight)).are_many
        )

    def finds_none(self, step: Pass) -> bool:
        """Return whether no window has lost anything that a query could ask for."""
        return not self._last_sight(step).has_lost

    def reset(self) -> None:
        """Let go of all entries."""
        self.of.clear()
        self._is_beside = None
        self._storing = {*self._attention}

    def select(self, rows: Tensor) -> None:
        for memory in self.of.values():
            memory.select(rows)

    def join(self, others: Sequence[Self]) -> None:
        self.of = {i: Memory.joined([other.of[i] for other in others]) for i in others[0].of}

    def state(self) -> dict[str, Tensor]:
        """Tensors of all layers, with digests of the entries of each slot in all of them, [B, S]
        int64: equal ones are of equal entries.
        """
        tensors: dict[str, Tensor] = {}
        if (first := self._first) is None:
            return tensors
        digests = torch.zeros(len(first.seen), first.num_used, dtype=torch.int64)
        for i, memory in self.of.items():
            entries = memory.entries.slots(0, memory.num_used)
            tensors |= {f"{i}.memory.{j}": x for j, x in enumerate(entries)}
            tensors[f"{i}.base"] = memory.base
            # No layer counts as another does.
            digests = digests * _OF_LAYER + memory.digests().cpu()
        return tensors | {"digests": digests}

    def begin_restore(self, state: Collection[str]) -> None:
        """A state with tensors of these names is about to be restored."""
        stored = {i for i in self._attention if f"{i}.memory.0" in state}
        self._storing = stored | self.recall.layer_bias.keys()

    def restore(self, layer: WindowLayer, read: ReadTensor, seen: list[int], head_dim: int) -> None:
        """Restore `state` of a layer, of rows that have been fed so many tokens."""
        if layer.layer_idx not in self._storing:
            return
        memory = self._of_layer(layer)
        entries = read_kv(
            read, "memory", memory.num_used_after(seen), head_dim, memory.form, memory.device
        )
        base = read("base", (1, head_dim), torch.float32, memory.device).clone()
        memory.restore(entries, base, seen)

    def check_editable(self) -> None:
        """Raise UserError unless entries can be moved to any place."""
        if len(self._storing) < len(self._attention):
            raise UserError(
                "this stream was saved when a memory of some layers stored nothing of the others: "
                "it cannot be edited, since the others could not fill their windows"
            )

    def take_parts(
        self, layer: WindowLayer, i: int, parts: Sequence[EntryPart], seen: int
    ) -> list[KV]:
        """Have the entries of these parts alone behind a layer, the i-th with attention, in rows
        of so many tokens; return those for its rings, as `edits.ring_entries` does.
        """
        memory, num_sinks = self._of_layer(layer), self.sizes.num_sinks
        form = memory.form
        sinks, others = [], []
        for part in parts:
            if isinstance(part, CachePart):  # a first key would be written into the base
                memory.base = _source(i, part).base.to(memory.device, copy=True)
            if part.is_raw(num_sinks):
                entries = bare(layer, i, part)
                stored = form.encode_at(entries, slice(0))
            else:
                assert isinstance(part, CachePart)
                source = _source(i, part)
                total = source.seen[0]
                first = total - self.kept_sizes.num_stored(total) + part.first
                stored = source.written(first, part.num)
                entries = form.decode_at(stored, slice(0)).map(lambda x: x.to(layer.device))
            if part.place < num_sinks:
                sinks.append(as_sinks(layer, i, part, entries))
            else:
                others.append(stored.map(lambda x: x.to(memory.device)))
        rings = [[*sinks] for _ in layer.rings]
        if others:
            rest = cat(others)
            memory.put([num_sinks] * len(rest.keys), rest)
            num = self.sizes.num_stored(seen) - num_sinks
            place = num_sinks + layer.cache.frame.num_behind(seen)
            newest = rest.slots(rest.keys.shape[2] - num, num).map(lambda x: x.to(layer.device))
            window = [newest] if form.is_int8 else in_window(layer, newest, place)
            for ring, stored in zip(rings, window, strict=True):
                ring.append(stored)
        memory.seen = [seen] * len(memory.entries.keys)
        return [cat(parts) for parts in rings]


def _source(i: int, part: CachePart) -> Memory:
    """Memory of the i-th layer with attention of the cache that a part is of."""
    layer = part.layers[i]
    assert isinstance(layer.memory, Memories)
    return layer.memory.of[layer.layer_idx]
