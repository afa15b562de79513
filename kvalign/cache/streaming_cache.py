"""Streaming cache: a fixed number of entries in each layer, and a next position that stays in
range, however long the stream is.

One `Pass`, made before the first layer, holds everything that is the same for all layers. The model
needs no hook and no patch: it asks the cache for its next position. Layers are of few kinds: sinks
and a window in a ring (`window_layer.py`), entries that a policy keeps (`policy_layer.py`), and, in
hybrid models, a state instead (`state_layer.py`).

Rows of a batch are independent. Each has its own length and is right-aligned, so that a pass writes
all rows at one slot. Missing entries on the left are masked until the row is full.

A pass that fails leaves layers that differ. From then on the cache is refused, until `reset` or
`restore`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from operator import sub
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig, PreTrainedModel

from kvalign.aligners.entries import KV
from kvalign.cache.layer import Form, Part, SinkKeys, StreamingLayer
from kvalign.cache.passes import HOST, Pass
from kvalign.cache.realigner import Realigner
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.window_layer import WindowLayer
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import expect
from kvalign.foundation.whole import NotPickled, Whole
from kvalign.models import kernel
from kvalign.models.architectures import FAMILIES, REGISTERED, ModelSpec, window_of
from kvalign.models.attention import install
from kvalign.models.wrapped import no_autograd_modes

if TYPE_CHECKING:
    from kvalign.memory.memories import Memories


class StreamingCache(NotPickled, Cache):
    """A `Cache` with a fixed number of entries. Pass it as `past_key_values`, without mask or
    position ids.

    Args:
        spec: the model, from `kvalign.models.spec_of(model.config)`.
        sizes: how many entries it keeps and evicts, and which.
        realigner: keeps the kept entries right; None leaves them unchanged.
        bases: of the keys that 8 bits store (`kvalign.cache.int8`); None: 0.
        config: of the model, whose attention can be told which slots a row has (`mark`). None: it
            gets entries in the order of time where rows have not all of them, and needs a mask.
        memory: where evicted entries go, made for these sizes; None: they are forgotten.

    Attributes:
        seen: number of tokens that each row has been fed since its last edit, and of entries that
            it had then.
        num_gone: number of tokens of each row that were evicted before its last edit.
        end: entries that the longest row has written, as `CacheSizes.slot` counts them: the next
            one's place in the ring.
        frame: the sizes, with the number of evictions after which entries are moved back.
        step: the current pass.
        last_step: the last pass, if it was of one token a row and has ended.
        last_token: number of tokens after which there is no position left; None: no end.
        attention: the layers that have entries.
        policy: which says what is evicted; None: the oldest entry.
        kept_sizes: by which entries are forgotten; with a memory more are kept than stored.
        ahead: what was read beyond the last token (`kvalign.streaming.lookup`), until any other
            token comes; None: nothing.
        guessed: entries of the guesses of the last pass, as each layer with attention stores them.
        stores_bare: whether keys are stored without their rotation.
        goes_by_order: whether attention needs entries in the order of time.
        takes_marks: whether it reads keys as their marks say (`mark`).
        asks: whether layers need our attention, even if all slots are of their row.
        reads_stored: whether our kernel, where it attends, reads entries of 8 bits as they are
            stored.
        rotates_sinks: whether the keys of sinks are rotated to follow the window.

    Raises:
        UserError: more entries than the model has positions for; a policy that does not fit.
    """

    instead = "a cache cannot be pickled: state() returns its tensors, restore() restores them"
    _is_user_defined = False  # transformers' `generate` says that it is, of a cache it was given
    attention: list[Any]
    policy: Any = None
    last_token: int | None = None
    is_static = False
    """Whether passes of one token have the shapes of a full cache."""
    ahead: Any
    guessed: list[KV]

    def __init__(
        self,
        spec: ModelSpec,
        sizes: CacheSizes,
        realigner: Realigner | None = None,
        bases: dict[int, Tensor] | None = None,
        config: PretrainedConfig | None = None,
        memory: Memories | None = None,
    ):
        expect("spec", spec, ModelSpec, "a ModelSpec: kvalign.models.spec_of(model.config)")
        expect("sizes", sizes, CacheSizes, "CacheSizes")
        sizes.check_fits(spec)
        self.sizes, self.bases, self.config, self.memory = sizes, bases, config, memory
        self.kept_sizes = sizes if memory is None else memory.kept_sizes
        realigner = realigner or Realigner()
        if sizes.is_oldest:
            self.realigner = realigner.within(sizes, spec.context_len)
        else:
            from kvalign.cache.policy_layer import policy_of

            of_policy = policy_of(spec, sizes, realigner, config)
            self.policy, self.realigner, self.last_token = of_policy
        strategy, rotation = self.realigner.strategy, self.realigner.rotation
        self.stores_bare = sizes.cache_dtype == "int8"
        if self.stores_bare and strategy == "move":
            raise UserError(
                f"cache_dtype int8 does not work here: entries of {spec.name or 'this model'} are "
                "computed again when they move, and would be rounded each time"
            )
        self.frame = self.realigner.frame(sizes, spec.context_len)
        if memory is not None and memory.frame is not None:
            self.frame = memory.frame
        # ALiBi's bias, and the mask of a layer that sees only a window, go by the order. So may
        # architectures that we do not know.
        self.goes_by_order = (
            not sizes.is_oldest
            or spec.family == "alibi"
            or (spec.window is not None and spec.window <= sizes.cache_size)
            or spec.model_type not in FAMILIES
        )
        self.takes_marks = spec.model_type in REGISTERED
        self.asks = strategy == "read" or self.stores_bare or memory is not None
        self.reads_stored = (
            self.stores_bare
            and config is not None
            and self.takes_marks
            and window_of(config) is None
            and not (strategy == "read" and rotation is not None)
            and kernel.can_rotate(rotation)
        )
        if self.reads_stored:
            install(config)
        self.rotates_sinks = rotation is not None and not self.stores_bare
        # Places of a memory or a policy: a model asks for the first position, and counts on.
        self._squeezes_all = self.realigner.place_positions is not None and not self.frame.lift
        self._moves = strategy == "move" or (self.realigner.runs_on and not self.stores_bare)
        self._counts_places = spec.family == "alibi"  # in the mask that uneven rows are told
        self.step: Pass | None = None
        self.last_step: Pass | None = None
        self._whole = Whole()
        self._hold_in_order([])
        self.sinks = SinkKeys(spec.num_layers, sizes.num_sinks)
        self.head_dim = spec.head_dim
        self.attention = [self._make_layer(i) for i in spec.attention]
        self.attention[0].is_first = self.attention[-1].is_last = True
        layers = [*self.attention]
        if spec.states:
            from kvalign.cache.state_layer import StateLayer

            layers = [StateLayer() for _ in range(spec.num_layers)]
            for layer in self.attention:
                layers[layer.layer_idx] = layer
        super().__init__(layers=layers)

    def _make_layer(self, layer_idx: int) -> StreamingLayer:
        if self.policy is None:
            return WindowLayer(self, layer_idx, self.sinks, self.sizes, self.memory)
        from kvalign.cache.policy_layer import PolicyLayer

        return PolicyLayer(self, layer_idx, self.policy, self.sizes)

    def _hold(self, seen: list[int], num_gone: list[int] | None = None) -> None:
        """Set up rows of so many tokens each, with entries where the next tokens find them."""
        self.seen, self.num_gone = seen, num_gone or [0] * len(seen)
        self._next: Pass | None = None  # pass of one token a row, as `begin_next` made it
        self.ahead = None
        # Places by which the entries of each row have been moved.
        self._num_moved = [*map(self.frame.num_moved, seen)]

    def _hold_in_order(self, seen: list[int], num_gone: list[int] | None = None) -> None:
        """Same, with entries in the order of time."""
        self._hold(seen, num_gone)
        self.end = self.num_stored

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
    def room(self) -> int:
        """Tokens that a call of the model may have, so that none of them sees an entry that would
        have been evicted before it, had they come one by one; at least 1.
        """
        return self.sizes.first_input_len - self.num_stored

    def index(self, row: int = 0) -> Tensor:
        """Return the tokens of a row's entries, counted from 0: [S] int64; with a policy by layer
        and head, [L, H, S].
        """
        num_tokens, num = 0, 0
        if self.seen:
            num_tokens, num = self.num_tokens[row], self.sizes.num_stored(self.seen[row])
        if self.policy is not None:
            self.settle()
            return torch.stack([layer.tokens_of(row, num) for layer in self.attention])
        tokens, first = torch.arange(num_tokens), self.sizes.num_sinks
        return tokens[(tokens < first) | (tokens >= first + num_tokens - num)]

    def positions(self) -> list[int]:
        """The position of each row's next token."""
        if self.sizes.positions == "keep":
            return [*self.seen]
        return [*map(sub, self.seen, map(self.frame.num_moved, self.seen))]

    def form(self, dtype: torch.dtype, layer_idx: int) -> Form:
        """Form in which a layer stores its entries, which attention reads in this dtype."""
        if not self.stores_bare:
            return Form(dtype)
        from kvalign.cache.int8 import Int8

        return Int8.of_layer(dtype, layer_idx, self.realigner, self.bases)

    @cached_property
    def angles(self) -> Tensor | None:
        """Angles of P positions, [1, 2, P, D / 2], for keys that our kernel reads as they are
        stored, as of `kernel.attend`; None if they do not rotate.
        """
        rotation = self.realigner.rotation
        if rotation is None:
            return None
        with no_autograd_modes():
            of_places = rotation.angles_to(slice(0, self.frame.last_position + 1), HOST)
            return torch.stack([of_places.cos, of_places.sin])[None]

    # Passes.

    def changing(self) -> AbstractContextManager[None]:
        """Context for one change to the cache; UserError if the change before did not end."""
        return self._whole.change(None if any(self.seen) else self.reset)

    @contextmanager
    def forward_pass(
        self, num_rows: int, num_new: int, kind: Callable[..., Pass] = Pass
    ) -> Iterator[Pass]:
        """A pass of the model over `num_new` tokens of each row. Within it, call the model with
        this cache. It counts when it ends without an exception.

        Args:
            kind: maker of the pass; another one is of a segment.

        Raises:
            UserError: more tokens than fit at once, another number of rows than the cache has, or a
                failed pass before.
        """
        self._check_takes(num_rows, num_new, kind is not Pass)
        with self.changing():
            try:
                self.step = step = self._begin(num_rows, num_new, kind)
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
            if num_new > 1 and self._squeezes_all:
                raise UserError(
                    "this cache squeezes positions from the first token on: feed one token at a "
                    "time, or use method.feed or stream_tokens"
                )
            self._whole.begin()
            self.step = self._begin(num_rows, num_new)
        self.describe()

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

    def begin_next(self) -> Pass:
        """Begin a pass of one token a row, which the next one will be if it has as many, while a
        device is busy with the last.
        """
        with self.changing():
            self._next = self._settled(1)
        return self._next

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
        last = self.last_token
        if last is not None and (seen := max(self.seen, default=0)) + num_new > last:
            raise UserError(
                f"positions=keep ends with the {last} positions of this model, got {num_new} more "
                f"tokens after {seen}: positions=compact has no end"
            )

    def _begin(self, num_rows: int, num_new: int, kind: Callable[..., Pass] = Pass) -> Pass:
        """A pass over so many tokens, with all entries where it finds them."""
        if not self.seen:
            self._hold_in_order([0] * num_rows)
        prepared, self._next = self._next, None
        if prepared is not None and num_new == 1 and kind is Pass:
            return prepared
        return self._settled(num_new, kind)

    def _settled(self, num_new: int, kind: Callable[..., Pass] = Pass) -> Pass:
        step = kind(
            sizes=self.sizes,
            frame=self.frame,
            num_new=num_new,
            device=self.attention[0].device if self.end else HOST,
            seen=self.seen,
            positions=self.positions(),
            end=self.end,
            rotates=self.realigner.rotation is not None,
            runs_on=self.realigner.runs_on,
            in_order=self._reads_in_order(num_new),
            place_positions=self.realigner.place_positions,
            is_static=self.is_static and num_new == 1,
        )
        self._move_entries(step)
        return step

    def _reads_in_order(self, num_new: int) -> bool:
        """Return whether attention gets entries in the order of time, or slots as they lie."""
        if self.goes_by_order:
            return True
        fewest = min(map(self.sizes.num_stored, self.seen))
        if fewest + num_new == min(self.end + num_new, self.sizes.first_input_len):
            return False
        if self.config is None or not self.takes_marks:
            return True
        install(self.config)
        return False

    def _move_entries(self, step: Pass) -> None:
        """Evict entries, and move the others to where a pass finds them."""
        self.ahead = None
        if self.memory is not None:
            self.memory.begin(step, self.attention, self._num_moved)
        if self.policy is not None and self.policy.reads_weights:
            assert self.config is not None
            install(self.config)
        num_moved = [*map(sub, step.seen, step.positions)]
        shifts = [*map(sub, num_moved, self._num_moved)]
        self._num_moved = num_moved
        shifts = shifts if self._moves and any(shifts) else []
        if self.end and (shifts or step.grows or self.policy is not None):
            for layer in self.attention:
                layer.begin(step, shifts)
            step.grows = False
        self.realigner.refresh()
        if not step.is_decode:
            self._rotate_sinks(step)

    def describe(self) -> Pass:
        """Describe to layers the pass that the cache is in, once a pass."""
        step, layer = self.step, self.attention[0]
        assert step is not None
        if not step.is_described:
            step.is_described = True
            if step.is_decode:
                self._rotate_sinks(step)
            # What needs no attention of ours asks for no kernel.
            if step.is_single and self.asks:
                step.by_kernel = kernel.attends(self.head_dim, layer.device, layer.dtype)
        return step

    def _rotate_sinks(self, step: Pass) -> None:
        """Rotate the keys of sinks, as far as the positions of the others have run on."""
        rotation, num = self.realigner.rotation, self.sizes.num_sinks
        is_moved = self.is_static or any(map(self.sizes.num_dropped, step.seen))
        if not self.rotates_sinks or not is_moved:
            return
        assert rotation is not None
        for device, keys in self.sinks.by_device.items():
            rotated = rotation.shift_layers(keys, -step.behind_rows, dim=0)
            layers = [layer for layer in self.attention if layer.device == device]
            own = [layer.entries.data.keys[:, :, :num] for layer in layers]
            torch._foreach_copy_(own, [rotated[layer.layer_idx] for layer in layers])

    def _end(self, step: Pass) -> None:
        self.seen = [n + step.num_lasting for n in step.seen]
        self.end += step.num_lasting
        self.last_step = step if step.is_single else None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The position of the next token; transformers asks for it before each pass. To models with
        ALiBi, whose bias counts entries, it is their number.
        """
        if self.step is None and self.last_token is not None:
            self.check_input(len(self.seen), 1)  # before a model looks up a position it has not
        if self._counts_places:
            return self.num_stored if self.step is None else self.step.num_before
        if self.step is not None:
            return self.step.position
        place, positions = max(self.positions(), default=0), self.realigner.place_positions
        return place if positions is None else int(positions[place])

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
        self.sinks.reset()
        if self.memory is not None:
            self.memory.reset()
        self._hold_in_order([])
        for layer in self.layers:
            layer.reset()
        self._whole.end()

    # Rows.

    def _parts(self) -> list[Part]:
        """Return the parts that hold rows."""
        return [self.sinks, *self.layers, *([] if self.memory is None else [self.memory])]

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

    reorder_cache = batch_select_indices = select

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select([row for row in range(len(self.seen)) for _ in range(repeats)])

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
        from kvalign.cache.saving import state_of

        return state_of(self) if self.seen else {}

    def restore(self, state: dict[str, Tensor], model: PreTrainedModel) -> None:
        """Restore a `state`; UserError if it does not fit this cache or this model."""
        from kvalign.cache.saving import restore

        self.reset()
        if state:
            with self.changing():
                restore(self, state, model)

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


def rows_of(rows: Sequence[int] | Tensor, num_rows: int) -> list[int]:
    """The numbers of rows [B'] of a batch, checked; UserError: one that it does not have."""
    named = rows.tolist() if isinstance(rows, Tensor) else rows
    if not all(type(row) is int and -num_rows <= row < num_rows for row in named):
        raise UserError(f"rows must be whole numbers below {num_rows}, got {rows!r:.80}")
    return list(named)
