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
from typing import Any, final

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvalign.cache.streaming_cache import StreamingCache
from kvalign.models.attention import install
from kvalign.models.snapshot import Snapshot
from kvalign.steppers.compiled import Compiled
from kvalign.steppers.step_file import (
    Run,
    has_compiler,
    is_read_by_kernel,
    load_or_make,
    tensors_of,
)

log = logging.getLogger(__name__)

CHANGED = "the model was changed: its stored step is no longer taken"
EVERY = 32  # steps between two comparisons of the whole model: together 0.02 ms a step


@final
class StoredStep:
    """Decode steps of a model that are stored: those of entries that are neither moved nor placed,
    where attention does not go by their order.
    Where our kernel attends, these are steps of any rows and cache size; one file is for one row,
    another for several. Else they are steps of one row with a full cache that evicts one entry.

    Args:
        is_int8: whether the entries have 8 bits.
        makes: whether steps without a file are compiled; else they are left to the model.
    """

    def __init__(self, model: PreTrainedModel, *, is_int8: bool, makes: bool = True):
        install(model.config)
        self.model, self.is_int8, self.makes = model, is_int8, makes
        self._runs: dict[bool, Run | None] = {}  # by whether they are for one row
        self._weights = tensors_of(model, is_int8)  # which they read where they lie
        self._snapshot = Snapshot(model)
        self._cache: Callable[[], Cache | None] = lambda: None
        self._num = 0  # of steps of this cache

    def has(self, num_rows: int) -> bool:
        """Return whether a stored step of so many rows has been loaded."""
        return self._runs.get(num_rows == 1) is not None

    def otherwise(self, **inputs: Any) -> Any:
        """The compiled model, for steps that are not stored; without a compiler the model."""
        return self._compiled(**inputs)

    @functools.cached_property
    def _compiled(self) -> Any:
        return Compiled(self.model, torch.compile(self.model)) if has_compiler() else self.model

    def logits(self, ids: Tensor, cache: Cache) -> Tensor | None:
        """Logits [B, V] after ids [B, 1], in the pass that the cache is in; None if its step is not
        stored.
        """
        if (inputs := self._inputs(ids, cache)) is None:
            return None
        run = self._run_for(cache, inputs)
        return None if run is None else run(inputs)[0][:, -1]

    def _inputs(self, ids: Tensor, cache: Cache) -> list[Tensor] | None:
        if type(cache) is not StreamingCache or len(cache.attention) < len(cache.layers):
            return None
        layer, step = cache.attention[0], cache.step
        if step is None or step.decode is None or step.in_order or not cache.stays:
            return None
        if layer.device.type != "cpu" or layer.dtype != self.model.dtype:
            return None
        entries = [layer.entries for layer in cache.attention]
        if is_read_by_kernel(self.model, entries[0].data.keys):
            places = cache.places(step)
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
        if cache.stores_bare and cache.turns is not None and cache.by_kernel:
            seen.append(cache.turns)
        return [ids, step.decode.position_ids, step.decode.slot, places, *seen]

    def _run_for(self, cache: Cache, inputs: list[Tensor]) -> Run | None:
        """The compiled step, if there is one for the model as it is now."""
        had = self._runs
        if not self._is_as_it_was(cache):
            self._snapshot = Snapshot(self.model)
            self._weights = tensors_of(self.model, self.is_int8)
            self._runs = {}
        is_one = len(inputs[0]) == 1
        if is_one not in self._runs:
            asked = self.model, inputs, self._weights, self.makes
            self._runs[is_one] = load_or_make(*asked) if self._snapshot.is_plain else None
            if self._runs[is_one] is None and had.get(is_one) is not None:
                log.warning(CHANGED)
        return self._runs[is_one]

    def _is_as_it_was(self, cache: Cache) -> bool:
        """Return whether the model is as when its steps were loaded. Hooks and the `forward` of
        classes are compared before each step, the rest as a stream begins and every few steps.
        """
        self._num = self._num + 1 if self._cache() is cache else 0
        self._cache = weakref.ref(cache)
        return (self._snapshot if self._num % EVERY == 0 else self._snapshot.code).holds()
