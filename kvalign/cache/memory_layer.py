"""A layer that takes back, at each step, the few of its lost entries that the step asks for.

     places  0 1 2 3 | 4 ... R+3  | R+4 ... C-1 | C
             sinks   | taken back | window      | new

What is taken back comes in place of the window's oldest entries, in the order of time, so a step
sees as many entries as without a memory, and computes its token at the same position.
"""

from collections.abc import Sequence
from functools import partial
from typing import Self, final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvalign.aligners import Move
from kvalign.cache.buffer import KV, cat
from kvalign.cache.layer import Owner
from kvalign.cache.memory import Found, Memory
from kvalign.cache.realigner import Realigner
from kvalign.cache.recall_places import RecallPlaces
from kvalign.cache.saved import ReadTensor
from kvalign.cache.segments import Block, Recalled, Segment
from kvalign.cache.sinks import Sinks
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.step import Step
from kvalign.cache.window_layer import WindowLayer
from kvalign.models.attention import mark


@final
class MemoryLayer(WindowLayer):
    """Sinks, a window and a memory.

    Args:
        born: what places entries from their birth.
        places: where what is taken back lies.
    """

    def __init__(
        self,
        cache: Owner,
        layer_idx: int,
        sinks: Sinks,
        sizes: CacheSizes,
        born: Realigner,
        places: RecallPlaces,
    ):
        self.born, self.places = born, places
        super().__init__(cache, layer_idx, sinks, sizes)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.memory = Memory(KV(key_states, value_states), self.sizes)

    def take(self, step: Step, new: KV) -> KV:
        segment, turned = step.segment, new
        if segment is not None:
            turned = KV(segment.turned(new.keys), new.values)
        self.memory.write(step.seen, self.without_position(step, turned, self.born))
        found = super().take(step, new)
        if max(step.seen) + step.num_new <= self.sizes.first_input_len:
            return found  # nothing is lost yet
        if segment is not None:
            return found._replace(keys=mark(found.keys, partial(self._attend_segment, segment)))
        return found._replace(keys=mark(found.keys, partial(self._attend, step)))

    def _attend(
        self, step: Step, query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        """Attention of one query [B, H, 1, D] over what a step sees: [B, 1, H, D]."""
        has_lost = [n >= self.sizes.first_input_len for n in step.seen]
        alike = len({*zip(step.stored, step.behind, step.births, has_lost, strict=True)}) == 1
        rows = [slice(None)] if alike else [slice(i, i + 1) for i in range(len(step.seen))]
        found = KV(keys, values)
        out = [self._attend_alike(step, x, query[x], found.rows(x), scale) for x in rows]
        return torch.cat(out).transpose(1, 2)

    def _attend_alike(
        self, step: Step, rows: slice, query: Tensor, found: KV, scale: float
    ) -> Tensor:
        """The same of rows that find their entries at the same places: [B, H, 1, D]."""
        sizes, realigner, device = self.sizes, self.cache.realigner, query.device
        seen, behind, num = step.seen[rows], step.behind[rows][0], step.stored[rows][0] + 1
        found = found.slots(found.keys.shape[2] - num, num)
        num_sinks, num_heads = min(sizes.num_sinks, num), found.keys.shape[1]
        sinks, window = found.slots(0, num_sinks), found.slots(num_sinks, num - num_sinks)
        # 1. The window where it is now, if it is stored without its position.
        if realigner.reads:
            first = num_sinks + step.births[rows][0] - num + 1
            now = torch.arange(first, first + num - num_sinks, device=device)
            window = KV(*realigner.read(self.layer_idx, *window, now, now + behind))
        parts, visible = [sinks, window], None
        if seen[0] >= sizes.first_input_len:
            # 2. What is taken back, in place of its oldest entries.
            of_rows, positions = (
                torch.tensor(x, device=device)[:, None] for x in (seen, step.positions[rows])
            )
            asked = self._as_asked(query.unflatten(1, (num_heads, -1)), positions) * scale
            recalled = self.memory.rows(rows).find(asked, of_rows, [n + 1 for n in seen])
            taken = self._placed(recalled, behind).map(lambda x: x.squeeze(2))
            num_taken = taken.keys.shape[2]
            parts = [sinks, taken, window.slots(num_taken, num - num_sinks - num_taken)]
            if sizes.recall_block > 1:  # a part of a block may be none, or in the window
                visible = torch.ones(*query.shape[:2], 1, num, dtype=torch.bool, device=device)
                of_heads = recalled.visible.repeat_interleave(query.shape[1] // num_heads, 1)
                visible[..., num_sinks : num_sinks + num_taken] = of_heads
        keys, values = cat(x.map(lambda y: y.to(query.dtype)) for x in parts)
        return scaled_dot_product_attention(
            query, keys, values, visible, scale=scale, enable_gqa=True
        )

    def _attend_segment(
        self, segment: Segment, query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        """Attention of a segment's queries [B, H, T, D], each of which takes back what it would
        alone: [B, T, H, D].
        """
        return segment.attend(self.layer_idx, query, keys, values, scale, self._recall)

    def _recall(self, segment: Segment, block: Block, query: Tensor) -> Recalled:
        """What the scaled queries [B, H, G, T, D] of a block take back."""
        positions, seen = (
            x[block.queries].expand(len(query), -1) for x in (segment.birth, segment.t)
        )
        end = [int(segment.t[-1]) + 1] * len(query)
        found = self.memory.find(self._as_asked(query, positions), seen, end)
        keys, values = self._placed(found, 0).map(Tensor.float)  # [B, H, T, R, D]
        scores = torch.einsum("bhgtd,bhtrd->bhgtr", query, keys)
        lost = found.visible & (seen >= self.sizes.first_input_len)[:, None, :, None]
        return Recalled(scores.masked_fill(~lost[:, :, None], -torch.inf), values)

    def _as_asked(self, query: Tensor, positions: Tensor) -> Tensor:
        """Queries [B, H, G, T, D] that were computed at positions [B, T], turned as if what they
        ask for lay right before the window, for entries without a position.
        """
        if self.born.rotation is None:
            return query
        near = self.sizes.num_in_sight + 1
        return self.born.rotation.shift(query, (positions - near)[:, None, None])

    def _placed(self, found: Found, behind: int) -> KV:
        """What was found where it is seen, in a frame that has run on by `behind`: [B, H, T, R, D].

        A table is read at the places of the entries that give way. Where they lie for the model is
        another thing on rotary positions, which are free.
        """
        num_rows, _, num_queries, num = found.ages.shape
        ranks = self.sizes.num_sinks + torch.arange(num, device=found.ages.device)
        at = self.places(found.ages).transpose(1, 2).flatten(0, 1)  # [B * T, H, R]
        entries = found.entries.map(lambda x: x.transpose(1, 2).flatten(0, 1))
        rotation = self.born.rotation
        now = ranks if rotation is not None or not self.places.by_age else at
        move = Move(0, self.sizes.num_sinks, now)
        keys, values = self.born.place(self.layer_idx, *entries, move)
        if rotation is not None:
            keys = rotation.shift(keys, ranks - at - behind)
        return KV(keys, values).map(
            lambda x: x.unflatten(0, (num_rows, num_queries)).transpose(1, 2)
        )

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        if self.is_initialized:
            self.memory.select(rows)

    def join(self, layers: Sequence[Self]) -> None:
        super().join(layers)
        self.memory.join([layer.memory for layer in layers])

    def state(self) -> dict[str, Tensor]:
        held = self.memory.held.slots(0, self.memory.used(self.cache.seen))
        return super().state() | {f"memory.{j}": x for j, x in enumerate(held)}

    def restore(self, read: ReadTensor, seen: list[int], head_dim: int, dtype: torch.dtype) -> None:
        super().restore(read, seen, head_dim, dtype)
        num = self.memory.used(seen)
        held = KV(*(read(f"memory.{j}", (num, head_dim), dtype) for j in range(2)))
        self.memory.write([self.sizes.num_sinks] * len(held.keys), held)
