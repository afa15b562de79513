"""The streaming cache: attention sinks and a window of fixed size, written once and never moved.

     places  0 1 2 3 | 4 5 6 ... C-1      C entries are kept between two steps
             sinks   | window

A step hands in the key and value of the new token. Attention gets all C + 1 entries, one slice of a
sliding buffer; before the next step the `num_evicted` oldest of the window are left out of it and
the sinks written in front again. The model needs no hook and no patch: it asks the cache for its
next position, which stays in range however long the stream is.

Rows of a batch are independent: each has its own length, right-aligned in the buffer, so that a
step writes all rows at one place. What a row lacks on the left is masked until it is full.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvalign.cache.cache_layer import StreamingLayer
from kvalign.cache.realign import OnRead, Realigner
from kvalign.cache.relative import Segment
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.step import Step
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import expect, typed
from kvalign.models.architectures import ModelSpec, spec_of
from kvalign.models.attention import install
from kvalign.models.input_ids import rows_of


class StreamingCache(Cache):
    """A `Cache` of fixed size: pass it as `past_key_values`, with neither mask nor position ids.

    Args:
        spec: the model, from `kvalign.models.spec_of(model.config)`.
        sizes: how many entries it keeps and drops, and when those that stay are moved.
        realigner: what keeps the entries that stay right; None leaves them unchanged.

    Attributes:
        seen: tokens that each row has been fed.

    Raises:
        UserError: more entries than the model has positions for.
    """

    layer_class: ClassVar[type[StreamingLayer]] = StreamingLayer

    def __init__(self, spec: ModelSpec, sizes: CacheSizes, realigner: Realigner | None = None):
        expect(
            "spec",
            spec,
            ModelSpec,
            "a ModelSpec: kvalign.models.spec_of(model.config)",
        )
        expect("sizes", sizes, CacheSizes, "CacheSizes")
        sizes.check_fits(spec)
        if realigner is not None:
            realigner = realigner.within(sizes, spec.context_len)
        self.sizes, self.realigner = sizes, realigner
        self.frame = realigner.frame(sizes, spec.context_len) if realigner else sizes
        self.segment: Segment | None = None
        self.ends_steps = True  # with the last layer; False: whoever began a step ends it
        self._forget()
        super().__init__(layers=[self.layer_class(self, i) for i in range(spec.num_layers)])

    def _forget(self) -> None:
        self.seen: list[int] = []
        self._moved: list[int] = []  # places by which the entries of each row have been moved
        # Sinks as they were computed [L, B, H, S, D], by device, for all layers to turn at once.
        self._sink_keys: list[tuple[list[StreamingLayer], Tensor]] = []
        self.step: Step | None = None

    @property
    def num_stored(self) -> int:
        """Entries that the next token finds, of the longest row."""
        return max((self.sizes.num_stored(n) for n in self.seen), default=0)

    @property
    def num_evictions(self) -> int:
        """Times that the longest row has dropped anything."""
        return self.sizes.num_dropped(max(self.seen, default=0)) // self.sizes.num_evicted

    def index(self, row: int = 0) -> Tensor:
        """Of a row's entries, the places of their tokens in the stream, counted from 0: [S]."""
        seen = self.seen[row] if self.seen else 0
        tokens, dropped = torch.arange(seen), self.sizes.num_dropped(seen)
        first = self.sizes.num_sinks
        return tokens if not dropped else torch.cat([tokens[:first], tokens[first + dropped :]])

    def positions(self) -> list[int]:
        """The position of each row's next token."""
        return [n - self.frame.num_moved(n) for n in self.seen]

    def row_inputs(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """What a model must be told to take a token of rows of unequal lengths; nothing if the
        rows are alike.
        """
        device, kind, told = model.device, model.config.model_type, {}
        positions, stored = self.positions(), [self.sizes.num_stored(n) for n in self.seen]
        if len(set(positions)) > 1 or len(set(stored)) > 1:
            told["position_ids"] = torch.tensor(positions, device=device)[:, None]
        if len(set(stored)) > 1:
            width = max(stored) + 1
            missing = width - 1 - torch.tensor(stored, device=device)
            visible = torch.arange(width, device=device) >= missing[:, None]
            hidden = ~visible[:, None, None]
            told["attention_mask"] = {
                "bloom": visible.long(),  # from which it counts positions
                "mpt": hidden,
            }.get(kind, torch.finfo(model.dtype).min * hidden.to(model.dtype))
        return told

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The position of the next token: transformers asks before each step."""
        if self.step is not None:
            return self.step.position
        return max(self.positions(), default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        num = self.step.num_before if self.step is not None else self.num_stored
        return num + query_length, self.get_seq_length(layer_idx) - num

    def begin_step(self, num_rows: int, num_new: int) -> Step:
        """Bring all entries to where the next tokens find them."""
        most = self.sizes.first_input_len
        if num_new > most and self.segment is None:
            raise UserError(
                f"this cache takes at most cache_size + 1 = {most} tokens at once, got {num_new}: "
                "feed them in parts, or let kvalign.stream_tokens do it"
            )
        if not self.seen:
            self.seen, self._moved = [0] * num_rows, [0] * num_rows
        if num_rows != len(self.seen):
            raise UserError(f"this cache has {len(self.seen)} rows, got ids of {num_rows}")
        if num_new > 1 and len(set(self.seen)) > 1:
            raise UserError(f"rows of unequal length take one token each, got {num_new}")
        first = self.layers[0]
        step = Step(
            sizes=self.sizes,
            realigner=self.realigner,
            num_new=num_new,
            device=first.device if first.is_filled else torch.device("cpu"),
            seen=self.seen,
            stored=[self.sizes.num_stored(n) for n in self.seen],
            behind=[self.frame.num_behind(n) for n in self.seen],
            positions=self.positions(),
        )
        self._settle(step)
        self._prepare(step)
        self.step = step
        return step

    def _prepare(self, step: Step) -> None:
        """Have what a plain step needs before it begins, and see whether it is one."""
        if isinstance(self.realigner, OnRead):
            install(self.realigner.config)
            self.realigner.prepare(len(self.layers))
        first = self.layers[0]
        is_alike = step.places is None and min(step.seen) >= self.sizes.num_sinks
        if step.num_new == 1 and is_alike and first.is_filled and self.segment is None:
            step.prepare(first.entries[0].end)

    def end_step(self) -> None:
        assert self.step is not None
        if self.step.is_plain:
            for layer in self.layers:
                for buffer in layer.buffers:
                    buffer.end += 1
        self.seen = [n + self.step.num_new for n in self.step.seen]
        self.step = None

    def settle(self) -> None:
        """Bring all entries to where the next token finds them, without a next token."""
        if self.seen and self.step is None:
            self.begin_step(len(self.seen), 0)
            self.step = None

    def _settle(self, step: Step) -> None:
        if max(step.seen) == 0:
            return
        moved = [self.frame.num_moved(n) for n in step.seen]
        shifts = [now - before for now, before in zip(moved, self._moved, strict=True)]
        self._moved = moved
        if any(shifts):
            for layer in self.layers:
                layer.move(step, shifts)
        if step.num_new == 1:
            for layer in self.layers:
                for buffer in layer.buffers:
                    buffer.make_room(max(step.stored), 1, buffer.data)
        if self.sizes.num_sinks and any(map(self.sizes.num_dropped, step.seen)):
            self._write_sinks(step)

    def _write_sinks(self, step: Step) -> None:
        """Put the sinks in front of the window again, turned to follow it."""
        rotation = self.realigner.rotation if self.realigner else None
        if rotation is None:
            for layer in self.layers:
                layer.write_sinks(step, layer.sinks[0])
            return
        if not self._sink_keys:
            for device in {layer.device for layer in self.layers}:
                layers = [layer for layer in self.layers if layer.device == device]
                self._sink_keys.append((layers, torch.stack([x.sinks[0] for x in layers])))
        for layers, keys in self._sink_keys:
            for layer, turned in zip(layers, rotation.shift(keys, -step.behind_rows), strict=True):
                layer.write_sinks(step, turned)

    def forget_turned_sinks(self) -> None:
        self._sink_keys = []

    def reset(self) -> None:
        """Forget everything: the next token is the first of a new stream."""
        self._forget()
        for layer in self.layers:
            layer.reset()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise UserError("a streaming cache cannot be cropped: the entries it evicted are gone")

    def select(self, rows: Sequence[int] | Tensor) -> None:
        """Keep these rows, in this order; one may come several times."""
        if not self.seen:
            return
        rows = rows_of(rows, len(self.seen))
        self.settle()
        self.seen, self._moved = ([x[row] for row in rows] for x in (self.seen, self._moved))
        self.forget_turned_sinks()
        for layer in self.layers:
            layer.select(torch.tensor(rows, dtype=torch.int64))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select(
            [row for row in range(len(self.seen)) for _ in range(typed("repeats", repeats, int))]
        )

    def join(self, others: Sequence["StreamingCache"]) -> None:
        """Add the rows of caches made alike, each fed something, after those that are here."""
        caches = [cache for cache in (self, *others) if cache.seen]
        if caches == [self] or not caches:
            return
        for cache in caches:
            cache.settle()
        width = max(cache.num_stored for cache in caches)
        for i, layer in enumerate(self.layers):
            layer.join([cache.layers[i] for cache in caches], width)
        self.seen, self._moved = (
            [x for cache in caches for x in getattr(cache, name)] for name in ("seen", "_moved")
        )
        self.forget_turned_sinks()

    def state(self) -> dict[str, Tensor]:
        """All that it holds, by name; `restore` of a cache made alike goes on with it."""
        if not self.seen:
            return {}
        self.settle()
        tensors = {"seen": torch.tensor(self.seen)}
        for i, layer in enumerate(self.layers):
            tensors |= {f"{i}.{name}": x for name, x in layer.state(self.num_stored).items()}
        return tensors

    def restore(self, state: dict[str, Tensor], model: PreTrainedModel) -> None:
        """Take up what `state` gave; UserError if it does not fit this cache or this model."""
        self.reset()
        if not state:
            return
        num_rows = state["seen"].numel() if "seen" in state else 0
        seen = expect_tensor(state, "seen", (num_rows,), torch.int64).tolist()
        if not all(0 < n < 2**62 for n in seen) or not seen:
            raise UserError("a stream's rows must have seen a token at least")
        spec, width = spec_of(model.config), max(map(self.sizes.num_stored, seen))

        for i, layer in enumerate(self.layers):

            def read(name: str, shape: tuple[int, ...], dtype: torch.dtype, i: int = i) -> Tensor:
                of_rows = (num_rows, spec.num_kv_heads, *shape)
                return expect_tensor(state, f"{i}.{name}", of_rows, dtype).to(model.device)

            layer.restore(read, width, spec.head_dim, model.dtype)
        self.seen, self._moved = seen, [self.frame.num_moved(n) for n in seen]


def expect_tensor(
    state: dict[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """A tensor of a state; UserError unless it is there with this shape and dtype."""
    tensor = state.get(name)
    if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
        what = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
        raise UserError(f"a stream's {name} must be {shape} {dtype}, found {what}")
    return tensor
