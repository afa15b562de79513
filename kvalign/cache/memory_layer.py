"""A layer that takes back, at each step, the few of its lost entries that the step asks for.

     places  0 1 2 3 | 4 ... R+3  | R+4 ... C-1 | C
             sinks   | taken back | window      | new

What is taken back lies in the order of time where the window's oldest entries would lie, so each
step sees as many entries as without a memory, at the same positions.
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
        born: the realigner that places entries from their birth.
    """

    def __init__(
        self, cache: Owner, layer_idx: int, sinks: Sinks, sizes: CacheSizes, born: Realigner
    ):
        self.born = born
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
            mark(found.keys, partial(segment.attend, self.layer_idx, recall=self._recall))
        else:
            mark(found.keys, partial(self._attend, step))
        return found

    def _attend(
        self, step: Step, query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        """Attention of one query [B, H, 1, D] over what a step sees: [B, 1, H, D]."""
        sizes, realigner = self.sizes, self.cache.realigner
        num_heads, num_sinks = keys.shape[1], sizes.num_sinks
        window = KV(keys, values).slots(num_sinks, keys.shape[2] - num_sinks)
        behind = step.behind_rows.to(keys.device)  # [B, 1, 1]
        if realigner.reads:
            places = step.first_place + torch.arange(window.keys.shape[2], device=keys.device)
            window = KV(*realigner.read(self.layer_idx, *window, places, places + step.behind[0]))
        positions = torch.tensor(step.positions, device=keys.device)[:, None]
        seen = torch.tensor(step.seen, device=keys.device)[:, None]
        found = self._find(query.unflatten(1, (num_heads, -1)), positions, seen, step)
        placed = self._placed(found.entries, behind[:, 0])
        recalled = placed.map(lambda x: x.squeeze(2).to(self.dtype))
        num = recalled.keys.shape[2]
        rest = window.slots(num, window.keys.shape[2] - num)
        k, v = cat([KV(keys, values).slots(0, num_sinks), recalled, rest]).map(
            lambda x: x.to(query.dtype)
        )
        mask = torch.ones(*k.shape[:2], 1, k.shape[2], dtype=torch.bool, device=k.device)
        mask[..., num_sinks : num_sinks + num] = found.visible
        mask = mask.repeat_interleave(query.shape[1] // num_heads, 1)
        out = scaled_dot_product_attention(query, k, v, mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)

    def _recall(self, block: Block, segment: Segment, query: Tensor, scale: float) -> Recalled:
        """What the queries [B, H, G, T, D] of a block take back, each as if it was fed alone."""
        num_rows, seen = len(query), segment.t[block.queries]
        positions, seen = (
            x.expand(num_rows, -1) for x in (segment.birth[block.queries], seen)
        )
        end = [int(segment.t[-1]) + 1] * num_rows
        found = self.memory.find(self._as_asked(query, positions), seen, end)
        keys, values = self._placed(found.entries, torch.zeros_like(seen)).map(Tensor.float)
        scores = torch.einsum("bhgtd,bhtrd->bhgtr", query.float() * scale, keys)
        lost = found.visible & (seen > self.sizes.cache_size)[:, None, :, None]
        return Recalled(scores.masked_fill(~lost[:, :, None], -torch.inf), values)

    def _find(self, query: Tensor, positions: Tensor, seen: Tensor, step: Step) -> Found:
        end = [n + step.num_new for n in step.seen]
        return self.memory.find(self._as_asked(query, positions), seen, end)

    def _as_asked(self, query: Tensor, positions: Tensor) -> Tensor:
        """Queries [B, H, G, T, D] that were computed at positions [B, T], turned as if what they
        ask for lay right before the window, for entries without a position.
        """
        if self.born.rotation is None:
            return query
        near = self.sizes.num_in_sight + 1
        return self.born.rotation.shift(query, (positions - near)[:, None, None])

    def _placed(self, entries: KV, behind: Tensor) -> KV:
        """Entries [B, H, T, R, D] at the places after the sinks, by rank, in a frame that has run
        on by `behind` [B, T].
        """
        num_rows, _, num_queries, num, _ = entries.keys.shape
        now = self.sizes.num_sinks + torch.arange(num, device=behind.device)
        at = (now + behind[..., None]).flatten(0, 1)[:, None]  # [B * T, 1, R]
        flat = entries.map(lambda x: x.transpose(1, 2).flatten(0, 1))  # [B * T, H, R, D]
        placed = self.born.place(self.layer_idx, *flat, Move(0, self.sizes.num_sinks, at))
        return KV(*placed).map(lambda x: x.unflatten(0, (num_rows, num_queries)).transpose(1, 2))

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.memory.select(rows)

    def join(self, layers: Sequence[Self]) -> None:
        super().join(layers)
        self.memory.join([layer.memory for layer in layers])

    def state(self) -> dict[str, Tensor]:
        held = zip(KV._fields, self.memory.held, strict=True)
        return super().state() | {f"memory.{name}": x for name, x in held}

    def restore(self, read: ReadTensor, width: int, head_dim: int, dtype: torch.dtype) -> None:
        super().restore(read, width, head_dim, dtype)
