"""Layer that takes back, at each step, the few evicted entries that match the step's queries.

     places  0 1 2 3 | 4 ... R+3  | R+4 ... C-1 | C
             sinks   | taken back | window      | new

They replace the window's oldest entries, in the order of time. So a step sees as many entries as
without a memory, and computes its token at the same position.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Self, final

import torch
from torch import Tensor

from kvalign.aligners.entries import KV, cat
from kvalign.cache.bare_keys import BareKeys
from kvalign.cache.edits import CachePart, as_sinks, bare_sinks, in_window
from kvalign.cache.layer import Owner
from kvalign.cache.saved import ReadTensor
from kvalign.cache.segments import Block, Recalled
from kvalign.cache.sinks import SinkKeys
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.step import Step
from kvalign.cache.window_layer import WindowLayer, read_kv
from kvalign.memory.memory import Memory
from kvalign.memory.recall import Found, QueryBatch, Recalls
from kvalign.models.attention import mark


@final
class MemoryLayer(WindowLayer):
    """Sinks, a window and a memory."""

    def __init__(
        self,
        cache: Owner,
        layer_idx: int,
        sinks: SinkKeys,
        sizes: CacheSizes,
        recalls: Recalls,
        grows: bool,
    ):
        self.recalls, self.grows = recalls, grows
        super().__init__(cache, layer_idx, sinks, sizes)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        form = replace(self.entries.form, bare=BareKeys(base=self.entries.form.bare.base))
        self.memory = Memory(KV(key_states, value_states), self.sizes, form, self.grows)

    def reset(self) -> None:
        super().reset()
        self.__dict__.pop("memory", None)  # there is none before the first entry

    def take(self, step: Step, new: KV) -> KV:
        # 1. What attention sees of the window.
        found = super().take(step, new)
        # 2. Tokens that come together are put aside at once, single ones some time later.
        if not step.is_single:
            if step.segment is not None:
                new = KV(step.segment.turned(self.layer_idx, new.keys), new.values)
            self.memory.write(step.seen, self.without_position(step, new, self.recalls.born))
        # 3. The rest is for its queries to say, once anything is lost.
        if step.segment is not None:
            attend = partial(step.segment.attend, self.layer_idx, recall=self._recall)
            return found._replace(keys=mark(found.keys, attend))
        if (asking := self.recalls.of_step) is None:
            return found
        # A tensor of its own: the ring keeps the keys, and would keep the mark.
        keys = mark(found.keys.detach(), partial(self._attend, step, asking))
        return found._replace(keys=keys)

    def put_aside(self, seen: list[int], num: int, at: Tensor) -> None:
        """Put the window's newest entries into the memory: those of `num` tokens of each row after
        `seen`, at the positions `at` [B, 1, num].
        """
        entries, realigner = self.newest(self.sources, num), self.realigner
        if self.memory.form.is_int8:  # they are stored bare, and there without a position
            self.memory.put(seen, entries)
            return
        if realigner.runs_on:
            assert realigner.rotation is not None
            entries = KV(realigner.rotation.shift(entries.keys, at), entries.values)
        self.memory.write(seen, entries)

    def recollect(self, i: int, pieces: Sequence[CachePart], num: int, place: int) -> list[KV]:
        """Hold the entries of these pieces alone; return those for its rings, the last `num` of
        them in the window, at the positions from `place` on.
        """
        form, num_sinks = self.memory.form, self.sizes.num_sinks
        sinks, others = [], []
        for piece in pieces:
            source = piece.layers[i]
            assert isinstance(source, MemoryLayer)
            self.memory.base = source.memory.base.clone()  # a first key would be written into it
            if piece.first < num_sinks:
                bare = bare_sinks(self, source, piece)
                stored = form.encode_at(bare, slice(0)).map(lambda x: x.to("cpu"))
            else:
                stored = source.memory.written(piece.written, piece.num)
                bare = form.decode_at(stored, slice(0)).map(lambda x: x.to(self.device))
            if piece.place < num_sinks:
                sinks.append(as_sinks(self, source, piece, bare))
            else:
                others.append(stored)
        rings = [[*sinks] for _ in self.rings]
        if others:
            held = cat(others)
            self.memory.put([num_sinks] * len(held.keys), held)
            newest = held.slots(held.keys.shape[2] - num, num).map(lambda x: x.to(self.device))
            window = [newest] if form.is_int8 else in_window(self, newest, place)
            for ring, stored in zip(rings, window, strict=True):
                ring.append(stored)
        return [cat(parts) for parts in rings]

    def _recall(self, block: Block, query: Tensor) -> Recalled:
        """Return the entries that the scaled queries [B, H, G, T, D] of a segment's block take
        back, each as it would alone.
        """
        asking = self.recalls.of_block(block)
        asked = self.recalls.asked(query, asking)
        found = self.memory.find(asked, asking)
        return self.recalls.recalled(self.layer_idx, asked, asking, found)

    def _attend(
        self,
        step: Step,
        asking: QueryBatch,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
    ) -> Tensor:
        """Attention of one query a row [B, H, 1, D] over the entries of a step, with the recalled
        ones instead of the window's oldest: [B, 1, H, D].
        """
        asked = self.recalls.asked(query.unflatten(1, (keys.shape[1], -1)) * scale, asking)
        found, realigner = self.memory.find(asked, asking), self.realigner
        stored = self.recalls.stored(self.layer_idx, realigner, step, asking, found)
        slots = step.oldest(stored.keys.shape[2]).to(keys.device)
        seen, bias = KV(keys, values), self._bias(asking, found, keys, slots)
        if torch.is_grad_enabled():  # which keeps what attention sees
            seen = seen.map(torch.clone)
        own = seen.at(slots)
        if asking.has_lost is not None:
            stored = own.unless(asking.has_lost[:, 0].to(keys.device), stored)
        seen.put_at(slots, stored)
        given = realigner.attend(step, self.layer_idx, query, *seen, scale, bias)
        if not torch.is_grad_enabled():
            seen.put_at(slots, own)
        return given

    def _bias(self, asking: QueryBatch, found: Found, keys: Tensor, slots: Tensor) -> Tensor | None:
        """Bias [B, H, S] float32 for the scores of a step's entries, recalled ones among them;
        None: nothing.
        """
        of_found = self.recalls.bias(found)
        if of_found is None:
            return None
        of_found = of_found[:, :, 0]
        if asking.has_lost is not None:
            of_found = of_found.masked_fill(~asking.has_lost[:, :1, None].to(keys.device), 0.0)
        bias = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
        return bias.index_copy(2, slots, of_found)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        if self.is_initialized:
            self.memory.select(rows)

    def join(self, layers: Sequence[Self]) -> None:
        super().join(layers)
        self.memory.join([layer.memory for layer in layers])

    def state(self) -> dict[str, Tensor]:
        held = self.memory.held.slots(0, self.memory.used(self.cache.seen))
        stored = {f"memory.{j}": x for j, x in enumerate(held)}
        return super().state() | stored | {"base": self.memory.base}

    def restore(self, read: ReadTensor, seen: list[int], head_dim: int, dtype: torch.dtype) -> None:
        super().restore(read, seen, head_dim, dtype)
        num, form = self.memory.used(seen), self.memory.form
        held = read_kv(read, "memory", num, head_dim, form, "cpu")
        self.memory.base = read("base", (1, head_dim), torch.float32, "cpu").clone()
        self.memory.put([self.sizes.num_sinks] * len(held.keys), held)
