"""Decode step, compiled once by AOTInductor into a file of the user's cache folder. Later starts
load it without a compiler and without tracing.

The file contains neither weights nor the cache's counts. A step is a function of a token, its
position and the entries that attention sees; it writes the last of these. So it is valid wherever
they lie in the buffers, and for all models of one shape.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvalign.cache.streaming_cache import StreamingCache
from kvalign.methods.step_file import Run, has_compiler, load_or_make, tensors_of

_KNOWN = ("torch", "transformers", "kvalign")  # packages whose modules are as their names say


@final
class StoredStep:
    """Replacement of a model for the steps of a full cache. Steps of one stream that evict one
    entry each, and neither move nor place any, are stored. Other steps, and models that cannot be
    exported, use `torch.compile`; without a C++ compiler they use the model itself.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._run: Run | None = None
        self._weights: dict[str, Tensor] | None = None  # which `_run` reads where they lie
        self._cache: Callable[[], Cache | None] = lambda: None

    @property
    def is_stored(self) -> bool:
        """Return whether a stored step has been used."""
        return self._run is not None

    @functools.cached_property
    def otherwise(self) -> Any:
        """The model for steps that are not stored."""
        return torch.compile(self.model) if has_compiler() else self.model

    def __call__(
        self, *, input_ids: Tensor, past_key_values: Cache, position_ids: Tensor, **same: Any
    ) -> CausalLMOutputWithPast:
        cache, by = past_key_values, None
        if self._takes(cache):
            assert isinstance(cache, StreamingCache)
            entries = cache.attention[0].entries
            if entries.data.keys.shape[2] != entries.size:
                by = self.model  # a buffer that grew with the stream has its length soon
            else:
                inputs = [input_ids, position_ids, *_seen(cache)]
                if (run := self._run_for(cache, inputs)) is not None:
                    return CausalLMOutputWithPast(logits=run(inputs)[0])
        by = self.otherwise if by is None else by
        return by(input_ids=input_ids, past_key_values=cache, position_ids=position_ids, **same)

    def _takes(self, cache: Cache) -> bool:
        if type(cache) is not StreamingCache or len(cache.attention) < len(cache.layers):
            return False
        layer, sizes = cache.attention[0], cache.sizes
        stays = layer.sources is layer.entries and not cache.realigner.reads
        return (
            stays
            and len(cache.seen) == 1
            and sizes.num_evicted == 1
            and layer.device.type == "cpu"
            and layer.dtype == self.model.dtype
        )

    def _run_for(self, cache: StreamingCache, inputs: list[Tensor]) -> Run | None:
        """The compiled step, of the weights that the model has as a stream begins."""
        if self._cache() is not cache:
            weights, before = tensors_of(self.model), self._weights
            if before is None or _places(weights) != _places(before):
                self._run = None
                if _is_plain(self.model):
                    self._run = load_or_make(self.model, inputs, weights)
            self._weights, self._cache = weights, weakref.ref(cache)
        return self._run


def _seen(cache: StreamingCache) -> list[Tensor]:
    """Keys and values of each layer that a step sees, its own among them."""
    assert cache.step is not None
    assert cache.step.decode is not None
    num, slot = cache.step.decode.num_visible, cache.step.decode.slot
    return [x for layer in cache.attention for x in layer.entries.data.slots(slot + 1 - num, num)]


def _places(weights: dict[str, Tensor]) -> dict[str, int]:
    return {name: x.data_ptr() for name, x in weights.items()}


def _is_plain(model: PreTrainedModel) -> bool:
    """Return whether its config and the names of its modules say all that it does."""
    return all(
        type(x).__module__.split(".")[0] in _KNOWN and not x._forward_hooks | x._forward_pre_hooks
        for x in model.modules()
    )
