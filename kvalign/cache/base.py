"""What every cache of fixed size shares: the books of its rows, the passes of the model, and how
transformers sees it. `streaming_cache.py` and `any_slot_cache.py` have a kind each.

A layer hands in the keys and values of new tokens and gets all entries for this pass's attention.
What is the same for all layers stands in one `Step`, which is made before the first of them. The
model needs no hook and no patch: it asks the cache for its next position.

Rows of a batch are independent: each has its own length, right-aligned, so that a pass writes all
rows at one place. What a row lacks on the left is masked until it is full.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvalign.cache.buffer import KV, Part
from kvalign.cache.realigner import Realigner
from kvalign.cache.saved import expect_tensor
from kvalign.cache.segments import Segment
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.step import Step
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import expect, typed
from kvalign.models.architectures import ModelSpec, spec_of
from kvalign.models.input_ids import rows_of


class FixedSizeCache(Cache, ABC):
    """A `Cache` that keeps so many entries: pass it as `past_key_values`, with neither mask nor
    position ids.

    Args:
        spec: the model, from `kvalign.models.spec_of(model.config)`.
        sizes: how many entries it keeps and drops, and which.
        realigner: what keeps the entries that stay right; None leaves them unchanged.

    Attributes:
        seen: tokens that each row has been fed.
        frame: the sizes with the number of evictions after which entries are moved back.
        step: the pass that is going on.

    Raises:
        UserError: more entries than the model has positions for.
    """

    def __init__(self, spec: ModelSpec, sizes: CacheSizes, realigner: Realigner | None = None):
        expect("spec", spec, ModelSpec, "a ModelSpec: kvalign.models.spec_of(model.config)")
        expect("sizes", sizes, CacheSizes, "CacheSizes")
        sizes.check_fits(spec)
        self.sizes = sizes
        self.realigner = (realigner or Realigner()).within(sizes, spec.context_len)
        self.frame = self.realigner.frame(sizes, spec.context_len)
        self.step: Step | None = None
        self._is_owned = False  # by a loop of ours, which begins and ends each pass
        self._hold([])
        super().__init__(layers=self._make_layers(spec.num_layers))

    @abstractmethod
    def _make_layers(self, num_layers: int) -> list[Any]:
        """Layers of this kind, of `StreamingLayer`."""

    @abstractmethod
    def index(self, row: int = 0) -> Tensor:
        """Of a row's entries, the places of their tokens in the stream, counted from 0."""

    @abstractmethod
    def _bring(self, step: Step) -> Step:
        """Evict what has to go, and bring what stays to where the tokens of a pass find it; return
        the pass that is taken.
        """

    def _hold(self, seen: list[int]) -> None:
        """Have rows of so many tokens each, their entries where the next tokens find them."""
        self.seen = seen

    @property
    def num_stored(self) -> int:
        """Entries that the next token finds, of the longest row."""
        return max((self.sizes.num_stored(n) for n in self.seen), default=0)

    @property
    def num_evictions(self) -> int:
        """Times that the longest row has dropped anything."""
        return self.sizes.num_dropped(max(self.seen, default=0)) // self.sizes.num_evicted

    def positions(self) -> list[int]:
        """The position of each row's next token."""
        return [n - self.frame.num_moved(n) for n in self.seen]

    @contextmanager
    def forward_pass(
        self, num_rows: int, num_new: int, segment: Segment | None = None
    ) -> Iterator[Step]:
        """A pass of the model over `num_new` tokens of each row: within it, call the model with
        this cache. It counts when it ends without an exception.

        Raises:
            UserError: more tokens than are taken at once, or of other rows than are here.
        """
        step = self._begin(num_rows, num_new, segment)
        self._is_owned = True
        try:
            yield step
            self._end(step)
        finally:
            self.step, self._is_owned = None, False
            if not any(self.seen):  # the first pass failed: the next one may be of other rows
                self.reset()

    def enter(self, layer_idx: int, new: KV) -> Step:
        """The pass in which a layer is handed new entries. A loop of the user's calls the model
        without `forward_pass`: there the first layer begins a pass, and the last one ends it.
        """
        if self.step is None or (layer_idx == 0 and not self._is_owned):
            self._begin(len(new.keys), new.keys.shape[2])
        assert self.step is not None
        return self.step

    def leave(self, layer_idx: int) -> None:
        """The layer has taken them."""
        if layer_idx == len(self.layers) - 1 and not self._is_owned:
            assert self.step is not None
            self._end(self.step)
            self.step = None

    def settle(self) -> Step | None:
        """Bring all entries to where the next token finds them: a pass over nothing, or None where
        there are none.
        """
        return self._settled(0) if self.seen and self.step is None else None

    def _begin(self, num_rows: int, num_new: int, segment: Segment | None = None) -> Step:
        most = self.sizes.first_input_len
        if num_new > most and segment is None:
            raise UserError(
                f"this cache takes at most cache_size + 1 = {most} tokens at once, got {num_new}: "
                "feed them in parts, or let kvalign.stream_tokens do it"
            )
        if not self.seen:
            self._hold([0] * num_rows)
        if num_rows != len(self.seen):
            raise UserError(f"this cache has {len(self.seen)} rows, got ids of {num_rows}")
        if num_new > 1 and len(set(self.seen)) > 1:
            raise UserError(f"rows of unequal length take one token each, got {num_new}")
        self.step = self._settled(num_new, segment)
        return self.step

    def _settled(self, num_new: int, segment: Segment | None = None) -> Step:
        first, positions = self.layers[0], self.positions()
        births = positions
        if self.realigner.runs_on:  # there positions have no meaning, elsewhere they are places
            births = [self.sizes.num_stored(n) for n in self.seen]
        device = first.device if first.is_filled else torch.device("cpu")
        return self._bring(
            Step.of(self.sizes, self.frame, self.seen, positions, births, num_new, segment, device)
        )

    def _end(self, step: Step) -> None:
        self.seen = [n + step.num_new for n in step.seen]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The position of the next token: transformers asks before each pass."""
        if self.step is not None:
            return self.step.position
        return max(self.positions(), default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        num = self.step.num_before if self.step is not None else self.num_stored
        return num + query_length, self.get_seq_length(layer_idx) - num

    def reset(self) -> None:
        """Forget everything: the next token is the first of a new stream."""
        self.step = None
        self._hold([])
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
        for part in self._parts():
            part.select(torch.tensor(rows, dtype=torch.int64))
        self._hold([self.seen[row] for row in rows])

    def _parts(self) -> list[Part]:
        """What holds rows."""
        return [*self.layers]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select(
            [row for row in range(len(self.seen)) for _ in range(typed("repeats", repeats, int))]
        )

    def join(self, others: Sequence[Self]) -> None:
        """Add the rows of caches made alike, each fed something, after those that are here."""
        caches = [cache for cache in (self, *others) if cache.seen]
        if caches == [self] or not caches:
            return
        for cache in caches:
            cache.settle()
        for part, *joined in zip(self._parts(), *(x._parts() for x in caches), strict=True):
            part.join(joined)
        self._hold([n for cache in caches for n in cache.seen])

    def state(self) -> dict[str, Tensor]:
        """All that it holds, by name; `restore` of a cache made alike goes on with it."""
        if not self.seen:
            return {}
        self.settle()
        tensors = {"seen": torch.tensor(self.seen)}
        for i, layer in enumerate(self.layers):
            tensors |= {f"{i}.{name}": x for name, x in layer.state().items()}
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
        spec = spec_of(model.config)

        for i, layer in enumerate(self.layers):

            def read(name: str, shape: tuple[int, ...], dtype: torch.dtype, i: int = i) -> Tensor:
                of_rows = (num_rows, spec.num_kv_heads, *shape)
                return expect_tensor(state, f"{i}.{name}", of_rows, dtype).to(model.device)

            layer.restore(read, seen, spec.head_dim, model.dtype)
        self._hold(seen)
