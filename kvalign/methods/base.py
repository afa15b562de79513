"""Base of every streaming method: read tokens, give the logits of the next one. It is the socket of
steppers, too: decode steps that are faster than a call of the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvalign.aligners import Aligner
from kvalign.cache.sizes import OF_POLICY, CacheSizes, num_evicted_of
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.foundation.errors import UserError
from kvalign.foundation.names import Registry
from kvalign.foundation.settings import expect, typed
from kvalign.foundation.whole import NotPickled
from kvalign.models.architectures import spec_of
from kvalign.models.wrapped import in_eval_mode, unwrapped

if TYPE_CHECKING:
    from kvalign.cache.edits import EncodedPart


class Stepper(ABC):
    """Maker of decode steps of one model. `Method`s on the model may share it."""

    @classmethod
    def ready(cls, method: Method) -> Self | None:
        """Stepper for a method that compiles nothing; None if there is none."""
        return None

    @classmethod
    @abstractmethod
    def compiling(cls, method: Method, **options: Any) -> Stepper | None:
        """Stepper that compiles, with options of `torch.compile`; None without a compiler."""

    @abstractmethod
    def logits(self, ids: Tensor, cache: StreamingCache) -> Tensor | None:
        """Logits [B, V] float32 after ids [B, T], in the pass that the cache is in; None: the
        stepper does not make this step, and has changed nothing.
        """

    @abstractmethod
    def word_for(self, num_rows: int) -> str | None:
        """Word for its steps of so many rows: compiled, stored, captured; None: it makes none."""

    def is_static(self, cache: Any) -> bool:
        """Return whether a new cache is to have the shapes of a full one from its first token."""
        return False

    def prepare_next(self, cache: StreamingCache) -> None:  # noqa: B027
        """Prepare the step after one that was just made, while the device makes that one."""

    def prepare(self, method: Method, num_rows: int) -> bool:
        """Prepare steps of so many rows for this start and later ones, and compile no others;
        return whether there are such steps.
        """
        return False


STEPPERS: Registry[type[Stepper]] = Registry(
    "stepper",
    {
        "captured": "kvalign.steppers.captured:Captured",
        "stored": "kvalign.steppers.stored:Stored",
        "compiled": "kvalign.steppers.compiled:Compiled",
    },
)
"""Steppers, those first that are taken first."""


def last_logits(call: Any, ids: Tensor, cache: Any, **inputs: Any) -> Tensor:
    """Logits [B, V] float32 after the last of ids [B, T], by a call of a model or of its like."""
    out = call(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **inputs)
    return out.logits[:, -1].float()


def check_ids(ids: Tensor, vocab_size: int | None = None) -> None:
    """Raise UserError unless ids are [B, T] int64 or int32, not empty, and below V if that is
    given. Single tokens on a GPU are not checked, since that would wait for the device.
    """
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        kind = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise UserError(f"ids must be a tensor [rows, tokens] of int64, got {kind}")
    if ids.numel() == 0:
        raise UserError(f"the prompt is empty: give at least one token, got ids {list(ids.shape)}")
    if vocab_size is not None and (ids.shape[1] > 1 or ids.device.type == "cpu"):
        low, high = map(int, torch.aminmax(ids))
        if not 0 <= low <= high < vocab_size:
            raise UserError(
                f"token ids must be below {vocab_size} for this model, got {low} to {high}"
            )


class Method(NotPickled, ABC):
    """Way to stream; an instance is a batch of streams, its rows.

    Rows that begin together are fed together. Streams of other lengths are fed alone and then
    `join`.

    Attributes:
        on_tokens: called during a long input with the number of tokens read since the last call.
    """

    instead = (
        "a method cannot be pickled: state() returns its stream's tensors, restore() restores them"
    )
    name: ClassVar[str]
    about: ClassVar[str]
    default_num_sinks: ClassVar[int] = 4
    default_num_evicted: ClassVar[int | str] = 1
    takes_aligner: ClassVar[bool] = False
    takes_policy: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()
    """Sizes that the method sets itself: `num_sinks`, `num_evicted`."""
    aligner_name: str | None = None
    """Name of the aligner in tables of results; None for a method without one."""
    warns: bool = True
    """Whether unintended losses of quality are logged; not in comparisons of methods."""
    why_size: str = ""
    """Reason for a default cache_size."""

    def __init__(self, model: PreTrainedModel, sizes: CacheSizes):
        # A model that comes compiled has its steps compiled; inputs of several tokens vary.
        self.model = unwrapped(model)
        self.stepper: Stepper | None = None
        if hasattr(model, "_orig_mod"):
            self.stepper = STEPPERS["compiled"](self.model, model)  # type: ignore[call-arg]
        self._modules = [*self.model.modules()]
        self.spec, self.sizes = spec_of(self.model.config), sizes
        self.on_tokens: Callable[[int], object] = lambda num: None
        sizes.check_fits(self.spec)

    @classmethod
    def sizes_for(
        cls,
        cache_size: int,
        num_sinks: int | None = None,
        num_evicted: int | str | None = None,
        aligner: Aligner | None = None,
        **more: Any,
    ) -> CacheSizes:
        """Sizes of a cache, with `more` of the fields of `CacheSizes`; None: the method's own
        default, or its aligner's.
        """
        if num_sinks is None:
            num_sinks = aligner.config.num_sinks if aligner else cls.default_num_sinks
        if num_evicted is None:
            num_evicted = cls.default_num_evicted
        window_size = cache_size - typed("num_sinks", num_sinks, int)
        sizes = {name: size for name, size in more.items() if size is not None}
        return CacheSizes(cache_size, num_sinks, num_evicted_of(num_evicted, window_size), **sizes)

    @classmethod
    def ignored_settings(cls) -> tuple[str, ...]:
        """Arguments of `sizes_for` without effect on this method."""
        of_aligner = () if cls.takes_aligner else ("realign_every",)
        of_policy = () if cls.takes_policy else OF_POLICY
        return (*cls.fixed, *of_aligner, *of_policy)

    @property
    def title(self) -> str:
        """Name of the method in a table: `kvalign (table)`."""
        return f"{self.name} ({self.aligner_name})" if self.aligner_name else self.name

    @property
    def in_words(self) -> str:
        """Description of the method: `kvalign (table), cache of 64 entries, 0 sinks`."""
        sizes = self.sizes
        positions = ", positions kept" if sizes.positions == "keep" else ""
        policy = "" if sizes.is_oldest else f", policy {sizes.policy}{positions}"
        aside = f", memory of {sizes.memory} tokens" if sizes.memory else ""
        sinks = f"{sizes.num_sinks} sinks"
        size = f"{sizes.cache_size} entries{' in int8' if sizes.cache_dtype == 'int8' else ''}"
        return f"{self.title}, cache of {size}, {sinks}{policy}{aside}"

    @property
    def goes_stale(self) -> bool:
        """Return whether entries that stay after an eviction are wrong at their new positions."""
        return False

    @property
    def tokens_left(self) -> int | None:
        """Tokens that can still be fed; None: no limit."""
        return None

    @property
    def fill(self) -> int:
        """Entries that the next token finds: at most cache_size; for `dense` all."""
        raise NotImplementedError(f"{self.name} does not say how full it is")

    @property
    def num_tokens(self) -> int:
        """Tokens of the stream that it was fed, as `edit` counts them."""
        raise self._not_editable()

    def num_forgotten(self, num_tokens: int) -> int:
        """Return how many tokens of one input are forgotten once it has been read."""
        return self.sizes.num_forgotten(self.sizes.num_dropped(num_tokens))

    @abstractmethod
    def reset(self) -> None:
        """Forget the stream."""

    def check_alike(self, others: Sequence[Method]) -> None:
        """Raise UserError unless others are methods with the same arguments, as `join` needs."""
        expect("others", others, Sequence, "methods made alike")
        for one in others:
            same = isinstance(one, type(self)) and one.model is self.model
            if not same or one.sizes != self.sizes:
                raise UserError(
                    f"others must have the same arguments, {self.in_words}, got {one!r:.80}"
                )

    def new(self) -> Self:
        """New method with the same arguments, which has been fed nothing."""
        method = object.__new__(type(self))
        method.__dict__.update(self.__dict__)
        method.reset()
        return method

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy that continues the same stream alone, on the same model."""
        method = self.new()
        method.restore(self.state())
        return method

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch, in this order; UserError if it cannot."""
        raise UserError(f"rows of {self.name} cannot be selected")

    def join(self, others: Sequence[Self]) -> None:
        """Append rows of others with the same arguments, of any lengths; UserError if it cannot."""
        raise UserError(f"rows of {self.name} cannot be joined")

    @abstractmethod
    def feed(self, ids: Tensor) -> Tensor:
        """Read ids [B, T] int64, T >= 1; return the next token's logits [B, V] float32."""

    def edit(self, start: int, stop: int, *new: Tensor | EncodedPart) -> int:
        """Replace tokens of each row's stream by others. Entries of those go, the new ones are
        encoded after what stands before them, and what stands behind moves to its new places: it is
        not encoded again. The oldest entries are evicted if there are too many.

        Args:
            start, stop: the tokens to replace, from `start` to before `stop`, counted from the
                first of the stream, evicted ones included.
            new: ids [B, n] int64, or entries of the model that were encoded alone
                (`kvalign.encode`), one after the other.

        Returns:
            The number of them that had been evicted before.

        Raises:
            UserError: no such tokens; a method whose entries cannot be edited.
        """
        raise self._not_editable()

    def _not_editable(self) -> UserError:
        why = "it does not move entries, as kvalign and streaming-llm do"
        return UserError(f"streams of {self.name} cannot be edited: {why}")

    def undo_edit(self) -> None:
        """Take the last edit back, exactly; UserError if there is none, or the stream went on."""
        raise UserError("there is no edit to undo")

    def compile(self, **options: Any) -> Self:
        """Compile the model for the steps of a full cache, whose shapes never change. The first
        step then takes long. Inputs of several tokens use the model uncompiled, and so does
        everything without a C++ compiler.
        """
        self.stepper = STEPPERS["compiled"].compiling(self, **options)
        return self

    def take_ready_stepper(self) -> Self:
        """Take the fastest stepper that needs no compiling: on CUDA a captured step, on a CPU one
        that an earlier start has stored.
        """
        of_each = (STEPPERS[name].ready(self) for name in STEPPERS)
        self.stepper = next(filter(None, of_each), self.stepper)
        return self

    @property
    def steps_in_a_word(self) -> str | None:
        """Word for steps of one row: compiled, stored, captured; None: calls of the model."""
        return None if self.stepper is None else self.stepper.word_for(1)

    def in_eval_mode(self) -> AbstractContextManager[None]:
        """Context for each call of the model: whatever its mode, dropout is off."""
        return in_eval_mode(self._modules)

    @torch.no_grad()
    def step(self, ids: Tensor, cache: StreamingCache) -> Tensor:
        """Pass over ids [B, T] after the entries of a cache: logits as of `feed`. Steppers get them
        as one block of int64, however the caller sliced them: compiled code looks at neither.
        """
        ids = ids.long().contiguous()
        with cache.forward_pass(len(ids), ids.shape[1]) as step:
            logits = None if self.stepper is None else self.stepper.logits(ids, cache)
            if self.stepper is None or logits is None:
                return self.forward(ids, cache, **step.inputs_of(self.model, self.spec))
        self.stepper.prepare_next(cache)
        return logits

    @torch.no_grad()
    def forward(self, ids: Tensor, cache: Cache, **inputs: Any) -> Tensor:
        """Pass of the model over ids [B, T]: logits as of `feed`."""
        with self.in_eval_mode():
            return last_logits(self.model, ids, cache, **inputs)

    def state(self) -> dict[str, Tensor]:
        """State of the stream, with which `restore` continues it; UserError if there is none."""
        raise UserError(f"streams of {self.name} cannot be saved")

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue the stream of a `state`, tensors on any device; UserError if they do not fit."""
        raise UserError(f"streams of {self.name} cannot be saved")
