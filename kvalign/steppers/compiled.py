"""Model that `torch.compile` has compiled, while it is the model that was compiled: a snapshot
tells.
"""

import copy
import functools
import logging
import sys
from itertools import chain
from operator import itemgetter
from types import FunctionType
from typing import Any, Self, TypeGuard, final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all
from transformers import PreTrainedModel

from kvalign.cache.passes import Pass
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.foundation.progress import warn_once
from kvalign.methods.base import Method, Stepper, last_logits
from kvalign.models.attention import install
from kvalign.models.wrapped import in_eval_mode

log = logging.getLogger(__name__)

NO_COMPILER = "there is no C++ compiler here (g++): steps that are not stored are not compiled"
OTHER_CODE = (
    "the model has other hooks, or another forward in a class, than when its step was compiled: "
    "its steps are not compiled"
)


_PACKAGES = ("torch", "transformers", "kvalign")  # packages whose modules are as their names say
_INERT = "transformers.utils.output_capturing"  # hooks that stay on a model and change nothing
_OF_ANY = frozenset(vars(nn.Module()))  # names of the attributes of every module


class Snapshot:
    """State of a model at one time.

    It contains the modules, their attributes, their code (`code_holds`), the functions of the files
    that define their classes, the tensors and where they lie, and the config. Weights that change
    where they lie do not count: a step reads them there. It does not see functions of other files,
    nor what changes inside the value of an attribute.
    """

    def __init__(self, model: nn.Module):
        modules = [*model.modules()]
        self._classes = [*{type(one) for one in modules}]
        of_each = ((one._forward_hooks, one._forward_pre_hooks) for one in modules)
        self._hooks: list[dict[int, Any]] = [
            of_all._global_forward_hooks,
            of_all._global_forward_pre_hooks,
            *chain.from_iterable(of_each),
        ]
        self._attributes = [vars(one) for one in modules]
        self._parts: list[dict[str, Any]] = [
            x for one in modules for x in (one._parameters, one._buffers, one._modules) if x
        ]
        self._values = [*chain.from_iterable(map(dict.values, self._parts))]  # no id is used again
        self._tensors = [one for one in self._values if isinstance(one, Tensor)]
        files = [vars(sys.modules[name]) for name in {type(one).__module__ for one in modules}]
        functions = ((_names_of_functions(one), one) for one in files)
        # Nothing reads the numbers of nn.Linear, of which there are most.
        read = ((names_of(one), vars(one)) for one in modules if type(one) is not nn.Linear)
        named = [*functions, *read]
        self._read = [(itemgetter(*names), values) for names, values in named if names]
        configs = {id(x): x for one in modules if (x := vars(one).get("config")) is not None}
        self._configs = [vars(config) for config in configs.values()]
        self._code_then = self._code()
        self._then = *self._now()[:-1], copy.deepcopy(self._configs)

    def code_holds(self) -> bool:
        """Return whether the model has the same hooks, those of all modules among them, and each
        class the same `forward`. It takes 0.07 ms for 400 modules, between two steps, which push
        them out of the processor's caches.
        """
        return self._code() == self._code_then

    def holds(self) -> bool:
        """Return whether the model is as it was; it takes 0.7 ms."""
        try:
            return self.code_holds() and self._now() == self._then
        except RuntimeError:  # a tensor took the place of a number
            return False

    @property
    def is_plain(self) -> bool:
        """Return whether there is no hook, each `forward` is that of a class of PyTorch,
        transformers or KV-Align, and no module has one of its own.
        """
        hooks, forwards = self._code_then
        return not (hooks or any("forward" in one for one in self._attributes)) and all(
            one.__module__.split(".")[0] in _PACKAGES for one in (*self._classes, *forwards)
        )

    def _code(self) -> tuple[list[Any], list[Any]]:
        hooks = [*chain.from_iterable(map(dict.values, self._hooks))] if any(self._hooks) else []
        read = [hook for hook in hooks if getattr(hook, "__module__", "") != _INERT]
        return read, [one.forward for one in self._classes]

    def _now(self) -> tuple[Any, ...]:
        return (
            [*map(len, self._attributes)],  # one more if a module gets a `forward` of its own
            [*map(id, chain.from_iterable(map(dict.values, self._parts)))],
            [*map(Tensor.data_ptr, self._tensors)],
            [read(values) for read, values in self._read],
            self._configs,
        )


def _names_of_functions(file: dict[str, Any]) -> list[str]:
    """Return the names of a file's functions, without those that PyTorch's compiler adds."""
    named = [name for name, x in file.items() if type(x) is FunctionType]
    return [name for name in named if not name.startswith("__")]


def names_of(module: nn.Module) -> list[str]:
    """Return the names of the public attributes that a module has beside those of every module."""
    return [name for name in vars(module) if name not in _OF_ANY and name[0] != "_"]


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

    def logits(self, ids: Tensor, cache: StreamingCache) -> Tensor | None:
        sizes = cache.sizes
        if not is_usual(cache) or cache.num_stored + 1 <= sizes.cache_size - sizes.num_evicted:
            return None
        position_ids = described(cache).position_ids
        with in_eval_mode(self._modules):
            return last_logits(self, ids, cache, position_ids=position_ids)

    @functools.cached_property
    def _snapshot(self) -> Snapshot:
        return Snapshot(self.model)

    def __call__(self, **inputs: Any) -> Any:
        if self._snapshot.code_holds():
            return self.compiled(**inputs)
        warn_once(OTHER_CODE)
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


def is_plain(cache: Any) -> TypeGuard[StreamingCache]:
    """Return whether a cache has nothing but sinks and windows."""
    is_ours = isinstance(cache, StreamingCache)
    return is_ours and cache.memory is None and cache.policy is None


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


def is_usual(cache: StreamingCache) -> bool:
    """Return whether the layers do the same in the pass that a cache is in as in every step of a
    full cache.
    """
    if cache.policy is not None or cache.step is None:
        return False
    finds_all = cache.memory is None or cache.memory.finds_all(cache.step)
    return cache.step.is_decode and cache.step.is_alike and finds_all


def described(cache: StreamingCache) -> Pass:
    """Return the pass that a cache is in, with all that layers ask of it: a value that is made at
    first use cannot be made in a trace.
    """
    step = cache.describe()
    _ = step.slot, step.read_slots, step.born, step.evicting, step.position_ids, step.behind_rows
    if cache.stores_bare:
        _ = cache.angles if step.by_kernel and cache.reads_stored else step.read_positions
    if cache.realigner.strategy == "read" or step.hides or cache.stores_bare:
        _ = step.sight_of_one, step.new_places
    if cache.memory is not None:
        cache.memory.prepare(step)
    return step
