"""Shared parts of all caches of fixed size: the counts of their rows, the passes of the model, rows
that are selected and joined, saving, and the interface to transformers. `streaming_cache.py` and
`any_slot_cache.py` have one kind each.

One `Pass`, made before the first layer, holds everything that is the same for all layers. The model
needs no hook and no patch: it asks the cache for its next position.

Rows of a batch are independent. Each has its own length and is right-aligned, so that a pass writes
all rows at one slot. Missing entries on the left are masked until the row is full.

A pass that fails leaves layers that differ. From then on the cache is refused, until `reset` or
`restore`.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import sub
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig, PreTrainedModel

from kvalign.aligners.entries import KV
from kvalign.cache.layer import Form, Part, expect_tensor
from kvalign.cache.passes import HOST, Pass
from kvalign.cache.realigner import Realigner
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import expect
from kvalign.foundation.whole import NotPickled, Whole
from kvalign.models.architectures import ModelSpec, spec_of
from kvalign.models.input_ids import rows_of


class FixedSizeCache(NotPickled, Cache, ABC):
    """A `Cache` with a fixed number of entries. Pass it as `past_key_values`, without mask or
    position ids.

    Args:
        spec: the model, from `kvalign.models.spec_of(model.config)`.
        sizes: how many entries it keeps and evicts, and which.
        realigner: keeps the kept entries right; None leaves them unchanged.
        bases: of the keys that 8 bits store (`kvalign.cache.int8`); None: 0.
        config: of the model, whose attention can be told which slots a row has (`mark`). None: it
            gets entries in the order of time where rows have not all of them, and needs a mask.

    Attributes:
        seen: number of tokens that each row has been fed since its last edit, and of entries that
            it had then.
        num_gone: number of tokens of each row that were evicted before its last edit.
        end: entries that the longest row has written, as `CacheSizes.slot` counts them: the next
            one's place in the ring.
        frame: the sizes, with the number of evictions after which entries are moved back.
        step: the current pass.
        stores_bare: whether keys are stored without their rotation.
        last_step: the last pass, if it was of one token a row and has ended.
        last_token: number of tokens after which there is no position left; None: no end.
        attention: the layers that have entries. Hybrid models have other layers, which have a
            state.

    Raises:
        UserError: more entries than the model has positions for.
    """

    def __init__(
        self,
        spec: ModelSpec,
        sizes: CacheSizes,
        realigner: Realigner | None = None,
        bases: dict[int, Tensor] | None = None,
        config: PretrainedConfig | None = None,
    ):
        expect("spec", spec, ModelSpec, "a ModelSpec: kvalign.models.spec_of(model.config)")
        expect("sizes", sizes, CacheSizes, "CacheSizes")
        sizes.check_fits(spec)
        self.sizes = sizes
        self.realigner = (realigner or Realigner()).within(sizes, spec.context_len)
        if sizes.cache_dtype == "int8" and self.realigner.strategy == "move":
            raise UserError(
                f"cache_dtype int8 does not work here: entries of {spec.name or 'this model'} are "
                "computed again when they move, and would be rounded each time"
            )
        self.bases, self.config = bases, config
        self.stores_bare = sizes.cache_dtype == "int8"
        self.frame = self.realigner.frame(sizes, spec.context_len)
        self.step: Pass | None = None
        self.last_step: Pass | None = None
        self._whole = Whole()
        self._counts_places = spec.family == "alibi"  # in the mask that uneven rows are told
        self._hold_in_order([])
        self.attention = self._make_layers(spec)
        self.attention[0].is_first = self.attention[-1].is_last = True
        layers = [*self.attention]
        if spec.states:
            from kvalign.cache.state_layer import StateLayer

            layers = [StateLayer() for _ in range(spec.num_layers)]
            for layer in self.attention:
                layers[layer.layer_idx] = layer
        super().__init__(layers=layers)

    instead = "a cache cannot be pickled: state() returns its tensors, restore() restores them"
    _is_user_defined = False  # transformers' `generate` says that it is, of a cache it was given
    attention: list[Any]
    last_token: int | None = None
    is_static = False
    """Whether passes of one token have the shapes of a full cache."""

    @abstractmethod
    def _make_layers(self, spec: ModelSpec) -> list[Any]:
        """Layers of this kind, of `StreamingLayer`, for those that have attention."""

    @abstractmethod
    def index(self, row: int = 0) -> Tensor:
        """Return the tokens of a row's entries, counted from 0: [S], or [L, H, S] int64."""

    @abstractmethod
    def _prepare_entries(self, step: Pass) -> None:
        """Evict entries, and move the others to where a pass finds them."""

    def _hold(self, seen: list[int], num_gone: list[int] | None = None) -> None:
        """Set up rows of so many tokens each, with entries where the next tokens find them."""
        self.seen, self.num_gone = seen, num_gone or [0] * len(seen)
        self._next: Pass | None = None  # pass of one token a row, as `prepare` made it

    def _hold_in_order(self, seen: list[int], num_gone: list[int] | None = None) -> None:
        """Same, with entries in the order of time."""
        self._hold(seen, num_gone)
        self.end = self.num_stored

    def _reads_in_order(self, stored: list[int], num_new: int) -> bool:
        """Return whether attention gets entries in the order of time, or slots as they lie."""
        return True

    @property
    def num_stored(self) -> int:
        """Entries that the next token finds, in the longest row."""
        return max((self.sizes.num_stored(n) for n in self.seen), default=0)

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each row's stream: those that were evicted, too."""
        return [x + y for x, y in zip(self.seen, self.num_gone, strict=True)]

    @property
    def num_evictions(self) -> int:
        """Number of evictions of the longest row."""
        return self.sizes.num_dropped(max(self.seen, default=0)) // self.sizes.num_evicted

    @property
    def is_filled(self) -> bool:
        """Return whether layers have received entries."""
        return self.end > 0 and self.attention[0].is_initialized

    def form(self, dtype: torch.dtype, layer_idx: int) -> Form:
        """Form in which a layer stores its entries, which attention reads in this dtype."""
        if not self.stores_bare:
            return Form(dtype)
        from kvalign.cache.int8 import Int8

        return Int8.of_layer(dtype, layer_idx, self.realigner, self.bases)

    def positions(self) -> list[int]:
        """The position of each row's next token."""
        return [*map(sub, self.seen, map(self.frame.num_moved, self.seen))]

    def changing(self) -> AbstractContextManager[None]:
        """Context for one change to the cache; UserError if the change before did not end."""
        return self._whole.change(None if any(self.seen) else self.reset)

    @contextmanager
    def forward_pass(
        self, num_rows: int, num_new: int, *, is_segment: bool = False, num_ahead: int = 0
    ) -> Iterator[Pass]:
        """A pass of the model over `num_new` tokens of each row. Within it, call the model with
        this cache. It counts when it ends without an exception.

        Args:
            is_segment, num_ahead: as of `Pass`.

        Raises:
            UserError: more tokens than fit at once, another number of rows than the cache has, or a
                failed pass before.
        """
        self._check_takes(num_rows, num_new, is_segment)
        with self.changing():
            try:
                self.step = step = self._begin(num_rows, num_new, is_segment, num_ahead)
                yield step
                self._end(step)
            finally:
                self.step = None

    def enter(self, new: KV) -> None:
        """The first layer receives new entries. A user's own loop calls the model without
        `forward_pass`: there the first layer begins a pass, and the last one ends it. An error
        after that is the user's: the token counts. UserError: more tokens than fit at once.
        """
        if not self._whole.is_changing:
            num_rows, num_new = len(new.keys), new.keys.shape[2]
            if self._is_user_defined:
                raise UserError(
                    "model.generate counts its own positions, which are wrong once this cache "
                    "evicts: pass custom_generate=kvalign.stream_generate, cache_size=... instead "
                    "of the cache, or use kvalign.stream_tokens"
                )
            self._check_takes(num_rows, num_new)
            if num_new > self.room:
                most = "one token at a time" if self.room == 1 else f"{self.room} tokens at once"
                raise UserError(
                    f"with {self.num_stored} entries this cache takes {most}, got {num_new}: a "
                    "call evicts nothing between its tokens. Feed fewer, or use "
                    "kvalign.stream_tokens"
                )
            if self.realigner.place_positions is not None:
                raise UserError("this cache squeezes positions: use method.feed or stream_tokens")
            self._whole.begin()
            self.step = self._begin(num_rows, num_new)
        self.describe()

    def describe(self) -> Pass:
        """Describe to layers the pass that the cache is in, once a pass."""
        assert self.step is not None
        return self.step

    def leave(self) -> None:
        """The last layer has taken its entries."""
        if self.step is not None and not self._whole.is_changing:
            self._end(self.step)
            self.step = None
            self._whole.end()

    def settle(self) -> Pass | None:
        """Bring all entries to where the next token finds them: a pass over no tokens. None if
        there are no entries, or within a pass.
        """
        if not self.seen:
            return None
        with self.changing():
            return self._begin(len(self.seen), 0) if self.step is None else None

    def _check_takes(self, num_rows: int, num_new: int, is_segment: bool = False) -> None:
        """Raise UserError unless a pass can have so many tokens of so many rows."""
        most = self.sizes.first_input_len
        if num_new > most and not is_segment:
            raise UserError(
                f"this cache takes at most cache_size + 1 = {most} tokens at once, got "
                f"{num_new}: feed the others one by one, or use kvalign.stream_tokens"
            )
        self.check_input(num_rows, num_new)
        if num_new > 1 and len(set(self.seen)) > 1:
            raise UserError(f"rows of unequal length take one token each, got {num_new}")

    def check_input(self, num_rows: int, num_new: int) -> None:
        """Raise UserError unless so many rows can read so many tokens, in any number of passes."""
        if self.seen and num_rows != len(self.seen):
            raise UserError(f"this cache has {len(self.seen)} rows, got ids of {num_rows}")

    @property
    def room(self) -> int:
        """Tokens that a call of the model may have, so that none of them sees an entry that would
        have been evicted before it, had they come one by one; at least 1.
        """
        return self.sizes.first_input_len - self.num_stored

    def _begin(
        self, num_rows: int, num_new: int, is_segment: bool = False, num_ahead: int = 0
    ) -> Pass:
        """A pass over so many tokens, with all entries where it finds them."""
        if not self.seen:
            self._hold_in_order([0] * num_rows)
        prepared, self._next = self._next, None
        if prepared is not None and num_new == 1 and not is_segment:
            return prepared
        return self._settled(num_new, is_segment, num_ahead)

    def prepare(self) -> Pass:
        """Prepare a pass of one token a row, which the next one will be if it has as many, while a
        device is busy with the last.
        """
        with self.changing():
            self._next = self._settled(1)
        return self._next

    def _settled(self, num_new: int, is_segment: bool = False, num_ahead: int = 0) -> Pass:
        stored = [*map(self.sizes.num_stored, self.seen)]
        step = Pass(
            sizes=self.sizes,
            frame=self.frame,
            num_new=num_new,
            device=self.attention[0].device if self.is_filled else HOST,
            seen=self.seen,
            positions=self.positions(),
            end=self.end,
            rotates=self.realigner.rotation is not None,
            runs_on=self.realigner.runs_on,
            in_order=self._reads_in_order(stored, num_new),
            place_positions=self.realigner.place_positions,
            is_static=self.is_static and num_new == 1,
            is_segment=is_segment,
            num_ahead=num_ahead,
        )
        self._prepare_entries(step)
        return step

    def _end(self, step: Pass) -> None:
        self.seen = [n + step.num_lasting for n in step.seen]
        self.end += step.num_lasting
        self.last_step = step if step.is_single else None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The position of the next token; transformers asks for it before each pass. To models with
        ALiBi, whose bias counts entries, it is their number.
        """
        if self._counts_places:
            return self.num_stored if self.step is None else self.step.num_before
        return max(self.positions(), default=0) if self.step is None else self.step.position

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        step = self.step
        if step is None:
            num = self.num_stored
        elif self._counts_places and not step.is_even:
            return step.num_visible, 0
        else:
            num = step.length - step.num_new
        return num + query_length, self.get_seq_length(layer_idx) - num

    def reset(self) -> None:
        """Forget everything: the next token is the first of a new stream."""
        self.step = self.last_step = None
        self._hold_in_order([])
        for layer in self.layers:
            layer.reset()
        self._whole.end()

    def _parts(self) -> list[Part]:
        """Return the parts that hold rows."""
        return [*self.layers]

    def select(self, rows: Sequence[int] | Tensor) -> None:
        """Keep these rows [B'], in this order; one may occur several times."""
        if not self.seen:
            return
        rows = rows_of(rows, len(self.seen))
        if rows == [*range(len(self.seen))]:
            return
        with self.changing():
            self.settle()
            for part in self._parts():
                part.select(torch.tensor(rows, dtype=torch.int64))
            self._hold(*([num[row] for row in rows] for num in (self.seen, self.num_gone)))

    def join(self, others: Sequence[Self]) -> None:
        """Append the rows of caches with the same arguments, each of which was fed something."""
        caches = [cache for cache in (self, *others) if cache.seen]
        if caches == [self] or not caches:
            return
        for cache in caches:
            cache.settle()
        with self.changing():
            for part, *joined in zip(self._parts(), *(x._parts() for x in caches), strict=True):
                part.join(joined)
            seen = [num for cache in caches for num in cache.seen]
            num_gone = [num for cache in caches for num in cache.num_gone]
            self._hold_in_order(seen, num_gone)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy with the same rows, which continues alone; the realigner is shared."""
        memo[id(self.realigner)] = self.realigner
        memo[id(self)] = other = object.__new__(type(self))
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for layer in other.attention:
            layer.cache = other
        return other

    def state(self) -> dict[str, Tensor]:
        """State of the cache as tensors by name; `restore` of a cache made with the same arguments
        continues from it.
        """
        if not self.seen:
            return {}
        with self.changing():
            self.settle()
        tensors = {"seen": torch.tensor(self.seen), "end": torch.tensor([self.end])}
        if any(self.num_gone):
            tensors["gone"] = torch.tensor(self.num_gone)
        for i, layer in enumerate(self.layers):
            tensors |= {f"{i}.{name}": x for name, x in layer.state().items()}
        return tensors

    def restore(self, state: dict[str, Tensor], model: PreTrainedModel) -> None:
        """Restore a `state`; UserError if it does not fit this cache or this model."""
        self.reset()
        if not state:
            return
        with self.changing():
            self._restore(state, model)

    def _restore(self, state: dict[str, Tensor], model: PreTrainedModel) -> None:
        num_rows = state["seen"].numel() if "seen" in state else 0
        seen = expect_tensor(state, "seen", (num_rows,), torch.int64).tolist()
        if min(seen, default=0) < 1:
            raise UserError("each row of a stream must have at least one token")
        stored = max(map(self.sizes.num_stored, seen))
        num_gone = [0] * num_rows
        if "gone" in state:
            num_gone = expect_tensor(state, "gone", (num_rows,), torch.int64).tolist()
        self.end = int(expect_tensor(state, "end", (1,), torch.int64))
        if min(num_gone) < 0 or self.end < stored:
            raise UserError("a stream's numbers of tokens are inconsistent")
        spec = spec_of(model.config)
        if spec.states:
            from kvalign.cache.state_layer import restore_states

            restore_states(self.layers, state, num_rows, model)
        for layer in self.attention:
            i = layer.layer_idx

            def read(
                name: str,
                shape: tuple[int, ...],
                dtype: torch.dtype,
                device: torch.device | None = None,
                i: int = i,
            ) -> Tensor:
                of_rows = spec.of_entries(num_rows, *shape)
                if dtype == torch.int8:
                    form: Any = self.form(model.dtype, i)
                    tensor = form.read(state, i, name, of_rows)
                else:
                    tensor = expect_tensor(state, f"{i}.{name}", of_rows, dtype)
                return tensor.to(device or model.device)

            layer.restore(read, seen, spec.head_dim, model.dtype)
        self._hold(seen, num_gone)

    reorder_cache = batch_select_indices = select

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select([row for row in range(len(self.seen)) for _ in range(repeats)])

    def __repr__(self) -> str:
        """`StreamingCache(cache_size=64, num_sinks=4): 64 entries in it, 100 tokens seen`, of each
        row if there are several.
        """
        sizes, seen, read = self.sizes, self.seen or [0], self.num_tokens or [0]
        some = f"cache_size={sizes.cache_size}, num_sinks={sizes.num_sinks}"
        some += "" if sizes.is_oldest else f", policy={sizes.policy!r}"
        some += f", memory={sizes.memory}" if sizes.memory else ""
        num_stored, num_fed = (
            "/".join(map(str, numbers))
            for numbers in ([sizes.num_stored(num) for num in seen], read)
        )
        return f"{type(self).__name__}({some}): {num_stored} entries in it, {num_fed} tokens seen"
