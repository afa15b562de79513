"""Model that `torch.compile` has compiled, while it is the model that was compiled."""

import functools
import logging
from typing import Any, Self, TypeGuard, final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.cache.base import FixedSizeCache
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.methods.base import Method, Stepper, last_logits
from kvalign.models.attention import install
from kvalign.models.snapshot import Snapshot
from kvalign.models.wrapped import in_eval_mode

log = logging.getLogger(__name__)

NO_COMPILER = "there is no C++ compiler here (g++): steps that are not stored are not compiled"
OTHER_CODE = (
    "the model has other hooks, or another forward in a class, than when its step was compiled: "
    "its steps are not compiled"
)


@final
class Compiled(Stepper):
    """Compiled model, for steps of a full cache, whose shapes never change. PyTorch compiles again
    what changes, except for hooks and the `forward` of a class: with others than at its first call
    the model is called instead.
    """

    def __init__(self, model: PreTrainedModel, compiled: Any):
        self.model, self.compiled, self._modules = model, compiled, [*model.modules()]

    @classmethod
    def compiling(cls, method: Method, **options: Any) -> Self | None:
        return cls.of(method.model, **options)

    @classmethod
    def of(cls, model: PreTrainedModel, **options: Any) -> Self | None:
        """Same, for a model."""
        install(model.config)
        if not options and not has_compiler():
            return None
        return cls(model, torch.compile(model, **options))

    def word_for(self, num_rows: int) -> str | None:
        return "compiled"

    def logits(self, ids: Tensor, cache: FixedSizeCache) -> Tensor | None:
        sizes = cache.sizes
        if not is_usual(cache) or cache.num_stored + 1 <= sizes.cache_size - sizes.num_evicted:
            return None
        decode = cache.describe().decode
        assert decode is not None
        with in_eval_mode(self._modules):
            return last_logits(self, ids, cache, position_ids=decode.position_ids)

    @functools.cached_property
    def _snapshot(self) -> Snapshot:
        return Snapshot(self.model)

    def __call__(self, **inputs: Any) -> Any:
        if self._snapshot.code_holds():
            return self.compiled(**inputs)
        _say()
        return self.model(**inputs)


@functools.cache
def has_compiler() -> bool:
    """Return whether there is a C++ compiler; if not, a line is logged, once."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        log.warning(NO_COMPILER)
        return False
    return True


@functools.cache
def _say() -> None:
    log.warning(OTHER_CODE)


def is_plain(cache: Any) -> TypeGuard[StreamingCache]:
    """Return whether a cache has nothing but sinks and windows."""
    return isinstance(cache, StreamingCache) and cache.memory is None


def may_be_static(cache: StreamingCache) -> bool:
    """Return whether attention can be told, in all layers, which slots have no entry yet."""
    is_told = cache.takes_marks and not cache.goes_by_order and cache.config is not None
    return is_told and len(cache.attention) == len(cache.layers)


def stays(cache: StreamingCache) -> bool:
    """Return whether a step writes entries as they come and reads them as they lie."""
    layer = cache.attention[0]
    realigner = cache.realigner
    is_kept = realigner.strategy != "read" and realigner.place_positions is None
    return layer.sources is layer.entries and is_kept


def is_usual(cache: Any) -> bool:
    """Return whether the layers do the same in the pass that a cache is in as in every step of a
    full cache.
    """
    if not isinstance(cache, StreamingCache) or cache.step is None:
        return False
    finds_all = cache.memory is None or cache.memory.finds_all
    return cache.is_decode(cache.step) and cache.step.is_alike and finds_all
