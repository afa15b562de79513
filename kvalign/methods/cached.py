"""Methods that keep entries in a streaming cache.

`streaming-llm` keeps attention sinks and a window (Xiao et al. 2024), `window` no sinks. `kvalign`
has the entries of a window realigned by a trained aligner (KV-Align 2024).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.aligners import Aligner
from kvalign.aligners.kinds import often
from kvalign.cache.realigner import Realigner, is_exact, realigner_of
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.foundation.errors import UserError
from kvalign.methods.base import STEPPERS, Method, check_ids
from kvalign.models.attention import install

if TYPE_CHECKING:
    from kvalign.cache.edits import EncodedPart


class Cached(Method):
    """Method that keeps entries in a streaming cache, correct for their positions.

    Attributes:
        places_by: the realigner of each of its caches, as `realigner` made it.
        is_exact: whether segments give the same result as decode steps.
    """

    takes_policy = True

    def __init__(self, model: PreTrainedModel, sizes: CacheSizes):
        super().__init__(model, sizes)
        self.places_by = self.realigner()
        self._renew()
        self._before_edit: StreamingCache | None = None
        self.is_exact = sizes.is_oldest and is_exact(
            self.model, sizes.cache_size, self.cache.realigner
        )
        if self.is_exact:
            install(self.model.config)

    def new_cache(self) -> StreamingCache:
        """Return an empty cache of this method."""
        config, memory, bases = self.model.config, None, None
        if self.sizes.memory:
            from kvalign.memory.memories import Memories

            memory = Memories(
                self.spec,
                self.sizes,
                self.places_by,
                config,
                self.num_positions,
                grows=self.stepper is None,
            )
        if self.sizes.cache_dtype == "int8":
            from kvalign.cache.int8 import key_bases

            bases = key_bases(self.model)
        cache = StreamingCache(self.spec, self.sizes, self.places_by, bases, config, memory)
        cache.is_static = self.stepper is not None and self.stepper.is_static(cache)
        if cache.is_static:  # marks hide slots that have no entry yet
            install(config)
        return cache

    @abstractmethod
    def realigner(self) -> Realigner | None:
        """Return the realigner that keeps entries right for their positions."""

    @property
    def goes_stale(self) -> bool:
        is_moved = self.sizes.positions == "compact"
        return self.spec.family == "learned" and self.places_by is None and is_moved

    @property
    def tokens_left(self) -> int | None:
        last = self.cache.last_token
        return None if last is None else last - max(self.cache.seen, default=0)

    def compile(self, **options: Any) -> Self:
        """Compile it. On a CPU and without options the compiled step is kept for later starts, if
        that is possible; on CUDA it is captured. UserError: a policy, whose steps differ.
        """
        if not self.sizes.is_oldest:
            raise UserError(
                f"policy {self.sizes.policy} with {self.sizes.positions} positions cannot be "
                "compiled: each step gathers entries"
            )
        by = "captured" if self.model.device.type == "cuda" else "stored"
        self.stepper = STEPPERS["compiled" if options else by].compiling(self, **options)
        self._begin()
        return self

    def take_ready_stepper(self) -> Self:
        super().take_ready_stepper()
        self._begin()
        return self

    def _begin(self) -> None:
        """Make the cache anew, as a stepper that was just taken needs it."""
        if not self.cache.seen:
            self.reset()

    @property
    def fill(self) -> int:
        return self.cache.num_stored

    def _renew(self) -> None:
        self.cache, self._made_for = self.new_cache(), self.stepper

    def reset(self) -> None:
        self._before_edit = None
        # One that has received nothing stays, but for what depends on the model's weights.
        is_used = bool(self.cache.seen) or self.cache.attention[0].is_initialized
        if is_used or self._made_for is not self.stepper or self.sizes.cache_dtype != "model":
            self._renew()

    def new(self) -> Self:
        method = super().new()
        if method.cache is self.cache:
            method._renew()
        return method

    def select(self, rows: Sequence[int]) -> None:
        self._before_edit = None
        self.cache.select(rows)

    def join(self, others: Sequence[Self]) -> None:
        self.check_alike(others)
        self._before_edit = None
        self.cache.join([method.cache for method in others])

    def state(self) -> dict[str, Tensor]:
        return self.cache.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        self._before_edit = None
        self.cache.restore(state, self.model)

    @property
    def num_tokens(self) -> int:
        return max(self.cache.num_tokens, default=0)

    def edit(self, start: int, stop: int, *new: Tensor | EncodedPart) -> int:
        from kvalign.methods.edits import edited_cache

        edited, num_lost = edited_cache(self, start, stop, new)
        if edited is not self.cache:
            self.cache, self._before_edit = edited, self.cache
        return num_lost

    def undo_edit(self) -> None:
        if self._before_edit is None:
            super().undo_edit()
        assert self._before_edit is not None
        self.cache, self._before_edit = self._before_edit, None

    def feed(self, ids: Tensor) -> Tensor:
        """Read ids [B, T]. If the relative form is exact, an input counts as its tokens one by one,
        and is read in segments. Else the first cache_size + 1 tokens are one prefill chunk, and
        later chunks have half a window each; all tokens of a chunk see the same older entries.
        """
        check_ids(ids, self.model.config.vocab_size)
        self._before_edit = None
        if ids.shape[1] == 1:
            logits = self.step(ids, self.cache)
            self.on_tokens(1)
            return logits
        self.cache.check_input(*ids.shape)
        with self.cache.changing():
            if len(set(self.cache.seen)) > 1:
                for i in range(ids.shape[1]):
                    logits = self.feed(ids[:, i : i + 1])
                return logits
            while True:
                num_now = self._chunk_len(ids.shape[1])
                now, ids = ids[:, :num_now], ids[:, num_now:]
                logits = self._read(now)
                self.on_tokens(now.shape[1])
                if ids.shape[1] == 0:
                    return logits

    def _read(self, ids: Tensor) -> Tensor:
        if self._fits_at_once(ids.shape[1]):
            return self.step(ids, self.cache)
        return self.feed_segment(ids, logits_to_keep=1)[:, -1].float()

    @torch.no_grad()
    def feed_segment(self, ids: Tensor, logits_to_keep: int = 0, num_ahead: int = 0) -> Tensor:
        """Read ids [B, T] with the same results as feeding them one by one; only if the relative
        form is exact.

        Args:
            num_ahead: as of `kvalign.cache.segments.feed`.

        Returns:
            logits [B, T, V] after each of them, or after the last few.
        """
        from kvalign.cache import segments

        self._before_edit = None
        with self.in_eval_mode(), self.cache.changing():
            return segments.feed(self.cache, self.model, ids, logits_to_keep, num_ahead)

    def _fits_at_once(self, num_tokens: int) -> bool:
        """Return whether one pass of the model's own attention is enough: nothing is evicted
        between these tokens.
        """
        seen = max(self.cache.seen, default=0)
        return (
            num_tokens == 1
            or not self.is_exact
            or (seen == 0 and num_tokens <= self.sizes.first_input_len)
        )

    def _chunk_len(self, num_left: int) -> int:
        stored = self.cache.num_stored
        if self.is_exact and not self._fits_at_once(num_left):
            from kvalign.cache import segments

            on_cpu = self.model.device.type == "cpu" or self.sizes.memory  # which is there
            return segments.SEGMENT_LEN if on_cpu else segments.SEGMENT_ON_GPU
        if stored < self.sizes.cache_size:
            return self.sizes.first_input_len - stored
        if not self.sizes.is_oldest or self.sizes.memory:
            return 1
        half = max(1, self.sizes.window_size // 2)
        if self.num_positions is None:
            return half
        return max(1, min(half, self.num_positions - max(self.cache.positions(), default=0)))

    @property
    def num_positions(self) -> int | None:
        """Number of possible original positions of an entry; None: no limit."""
        return self.spec.context_len


class StreamingLLM(Cached):
    """Sinks and a window.

    Rotary keys keep their distances, ALiBi works by place, learned positions stay stale. On a
    rotary model with `num_evicted="half"` this keeps and moves the same entries as llama.cpp's
    context shift (`--context-shift`, `--keep` for the sinks; off by default since 2025). With a
    smaller number it equals LLM Runtime's shift-RoPE-K (`n_discard`). Without rotary positions
    llama.cpp shifts nothing, and its entries stay stale, too.
    """

    name = "streaming-llm"
    about = (
        "keeps sinks and a window; rotary keys keep their distances, learned positions become stale"
    )

    def realigner(self) -> Realigner | None:
        return realigner_of(self.model)


class Window(StreamingLLM):
    """The last C entries and no sinks, the baseline of the StreamingLLM paper."""

    name = "window"
    about = "keeps the last entries, no sinks"
    default_num_sinks = 0
    fixed = ("num_sinks",)


class KVAlign(Cached):
    name = "kvalign"
    about = (
        "keeps sinks and a window; a trained aligner corrects keys and values for their new "
        "positions"
    )
    takes_aligner = True

    def __init__(self, model: PreTrainedModel, sizes: CacheSizes, *, aligner: Aligner):
        if sizes.positions == "keep":
            raise UserError(
                "positions=keep leaves entries at their original positions, so there is "
                "nothing to align: use method streaming-llm"
            )
        self.aligner = aligner
        super().__init__(model, sizes)
        aligner.check(self.model, sizes)
        if sizes.realign_every > 1 and self.cache.realigner.runs_on:
            raise UserError("realign_every must be 1: a table on rotary keys moves nothing")
        self.aligner_name = often(aligner.label, sizes.realign_every)

    @property
    def num_positions(self) -> int:
        of_table = self.aligner.config.chunk_len  # which may know more than the model has
        return min(of_table, self.spec.context_len or of_table)

    def realigner(self) -> Realigner | None:
        return realigner_of(self.model, self.aligner, self.sizes)
