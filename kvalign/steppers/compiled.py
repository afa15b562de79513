"""Model that `torch.compile` has compiled, while it is the model that was compiled."""

import functools
import logging
from typing import Any, Self, final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.cache.base import FixedSizeCache
from kvalign.methods.base import Method
from kvalign.methods.stepper import Stepper, last_logits
from kvalign.models.attention import install
from kvalign.models.eval_mode import in_eval_mode
from kvalign.models.snapshot import Code
from kvalign.steppers.caches import is_usual

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

    Args:
        compiled: the model, as `torch.compile` returns it.
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
    def _code(self) -> Code:
        return Code(self.model)

    def __call__(self, **inputs: Any) -> Any:
        if self._code.holds():
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
