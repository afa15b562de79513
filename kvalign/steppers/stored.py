"""Decode step, compiled once by AOTInductor into a file of the user's cache folder. Later starts
load it without a compiler and without tracing.

The file contains neither weights nor the cache's counts. A step is a function of tokens, their
positions and the entries in the buffers; it writes those of the tokens. So it is valid for all
models of one shape and with the same attributes.
"""

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, Self, final

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvalign.cache.base import FixedSizeCache
from kvalign.cache.int8 import InSight, is_read_by_kernel, places_of
from kvalign.methods.base import Method, Stepper
from kvalign.methods.cached import Cached
from kvalign.models.attention import install
from kvalign.steppers import step_file
from kvalign.steppers.compiled import Compiled, Snapshot, is_plain, stays
from kvalign.steppers.step_file import Run, load_or_make, tensors_of

log = logging.getLogger(__name__)

CHANGED = "the model was changed: its stored step is no longer taken"
EVERY = 32  # steps between two comparisons of the whole model: together 0.02 ms a step


@final
class Stored(Stepper):
    """Decode steps of a model that are stored: those of entries that are neither moved nor placed,
    where attention does not go by their order.
    Where our kernel attends, these are steps of any rows and cache size; one file is for one row,
    another for several. Else they are steps of one row with a full cache that evicts one entry.

    Args:
        is_int8: whether the entries have 8 bits.
        makes: whether steps without a file are compiled; else they are left to the model.

    Attributes:
        falls_back: whether steps that cannot be stored are compiled at each start.
    """

    def __init__(self, model: PreTrainedModel, *, is_int8: bool, makes: bool = True):
        install(model.config)
        self.model, self.is_int8, self.makes = model, is_int8, makes
        self.falls_back = makes
        self._runs: dict[bool, Run | None] = {}  # by whether they are for one row
        self._weights = tensors_of(model, is_int8)  # which they read where they lie
        self._snapshot = Snapshot(model)
        self._cache: Callable[[], Cache | None] = lambda: None
        self._num = 0  # of steps of this cache

    @classmethod
    def ready(cls, method: Method) -> Self | None:
        if not isinstance(method, Cached) or not is_plain(method.cache):
            return None
        if method.model.device.type != "cpu" or step_file.is_empty():
            return None
        stepper = cls(method.model, is_int8=method.cache.stores_bare, makes=False)
        stepper._try(method, 1, method.sizes.num_sinks + 1)
        return stepper

    @classmethod
    def compiling(cls, method: Method, **options: Any) -> Self | None:
        return cls(method.model, is_int8=method.sizes.cache_dtype == "int8")

    def has(self, num_rows: int) -> bool:
        """Return whether a stored step of so many rows has been loaded."""
        return self._runs.get(num_rows == 1) is not None

    def word_for(self, num_rows: int) -> str | None:
        return "stored" if self.has(num_rows) else "compiled" if self.falls_back else None

    @functools.cached_property
    def fallback(self) -> Stepper | None:
        """The compiled model, for steps that are not stored; None without a compiler."""
        return Compiled.of(self.model)

    def prepare(self, method: Method, num_rows: int) -> bool:
        self.falls_back = False
        # With some attention only steps of a full cache are stored.
        lens = method.sizes.num_sinks + 1, method.sizes.first_input_len
        return any(self._try(method, num_rows, num) for num in lens)

    def _try(self, method: Method, num_rows: int, num_tokens: int) -> bool:
        """Step once after so many tokens; return whether the step is a stored one."""
        trial, rng = method.new(), torch.Generator().manual_seed(0)
        trial.stepper = self
        for num in (num_tokens, 1):  # of equal tokens attention would not matter
            ids = torch.randint(self.model.config.vocab_size, (num_rows, num), generator=rng)
            trial.feed(ids.to(self.model.device))
        return self.has(num_rows)

    def logits(self, ids: Tensor, cache: FixedSizeCache) -> Tensor | None:
        if (inputs := self._inputs(ids, cache)) is not None:
            run = self._run_for(cache, inputs)
            if run is not None:
                return run(inputs)[0][:, -1]
        if self.falls_back and self.fallback is not None:
            return self.fallback.logits(ids, cache)
        return None

    def _inputs(self, ids: Tensor, cache: Cache) -> list[Tensor] | None:
        if not is_plain(cache) or len(cache.attention) < len(cache.layers):
            return None
        layer, step = cache.attention[0], cache.step
        if step is None or not cache.is_decode(step) or step.in_order or not stays(cache):
            return None
        if layer.device.type != "cpu" or layer.dtype != self.model.dtype:
            return None
        decode, entries = cache.describe().decode, [layer.entries for layer in cache.attention]
        assert decode is not None
        angles = None
        if isinstance(decode.in_sight, InSight):
            places, _, angles = decode.in_sight
        elif is_read_by_kernel(self.model, entries[0].data.keys):
            places = places_of(step, entries[0].num_slots)
        elif (
            len(ids) == 1
            and cache.sizes.num_evicted == 1
            and step.size == cache.sizes.first_input_len
            and not step.hides
        ):
            places = step.places
        else:
            return None
        seen = [x for ring in entries for x in ring.data]
        if angles is not None:
            seen.append(angles)
        return [ids, decode.position_ids, decode.slot, places, *seen]

    def _run_for(self, cache: Cache, inputs: list[Tensor]) -> Run | None:
        """The compiled step, if there is one for the model as it is now."""
        had = self._runs
        if not self._is_as_it_was(cache):
            self._snapshot = Snapshot(self.model)
            self._weights = tensors_of(self.model, self.is_int8)
            self._runs = {}
        is_one = len(inputs[0]) == 1
        if is_one not in self._runs:
            request = self.model, inputs, self._weights, self.makes
            self._runs[is_one] = load_or_make(*request) if self._snapshot.is_plain else None
            if self._runs[is_one] is None and had.get(is_one) is not None:
                log.warning(CHANGED)
        return self._runs[is_one]

    def _is_as_it_was(self, cache: Cache) -> bool:
        """Return whether the model is as when its steps were loaded. Hooks and the `forward` of
        classes are compared before each step, the rest as a stream begins and every few steps.
        """
        self._num = self._num + 1 if self._cache() is cache else 0
        self._cache = weakref.ref(cache)
        snapshot = self._snapshot
        return snapshot.holds() if self._num % EVERY == 0 else snapshot.code_holds()
