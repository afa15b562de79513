"""Captured step: the kernels of a decode step on CUDA, recorded once and replayed without Python.

A CUDA graph runs the same kernels on the same addresses. In a ring nothing but tensors changes from
step to step (`kvalign.cache.passes.Pass`), so these are copied to where the graph reads them.
What differs otherwise has a graph of its own: another number of rows, a cache that is not full
(whose slots without an entry are hidden), other buffers. A memory on the card is searched in the
graph, once every query finds as much as it takes back; what it takes in is written between steps.
"""

import functools
import inspect
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvalign.aligners import entries, table
from kvalign.cache import attention
from kvalign.cache.passes import Pass
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.methods.base import Method, Stepper, last_logits
from kvalign.methods.cached import Cached
from kvalign.models.wrapped import in_eval_mode
from kvalign.steppers.compiled import (
    Compiled,
    Snapshot,
    described,
    has_compiler,
    may_be_static,
    stays,
)

log = logging.getLogger(__name__)

_ROTATION = "apply_rotary_pos_emb"  # of queries and keys, in the file of a model
_OURS = (entries.write, table.standardised, attention.placed_attention)
MOST_SHAPES = 64  # of inputs and weights that a region is compiled for
_OF_PRODUCTS = {"coordinate_descent_tuning": True}  # with it products of one row are fused, too


class Regions:
    """Regions of a model that are compiled once for all its layers: norms, MLPs, products, the
    rotation of queries and keys, and what we do with entries. To compile a whole model takes
    minutes, since each layer is compiled by itself. Its regions take seconds: attention between
    them is a call of a library anyway.
    """

    def __init__(self, model: PreTrainedModel, **options: Any):
        of_products = options
        if not options and model.device.type == "cuda":
            of_products = {"options": _OF_PRODUCTS}

        def compiled(function: Any, multiplies: bool) -> Any:
            return torch.compile(
                function, dynamic=False, **(of_products if multiplies else options)
            )

        modules = [*_regions(model)]
        classes = {type(one): any(x.dim() > 1 for x in _weights(one)) for one in modules}
        forwards = {cls: compiled(cls.forward, multiplies) for cls, multiplies in classes.items()}
        # What is called by which name, in which namespace.
        self._calls: list[tuple[dict[str, Any], str, Any]] = [
            (vars(one), "forward", functools.partial(forwards[type(one)], one)) for one in modules
        ]
        files = {sys.modules[type(one).__module__] for one in model.modules()}
        functions = [(sys.modules[one.__module__], one.__name__) for one in _OURS]
        functions += [(file, _ROTATION) for file in files if hasattr(file, _ROTATION)]
        for file, name in functions:
            self._calls.append((vars(file), name, compiled(getattr(file, name), file is attention)))

    @contextmanager
    def called(self) -> Iterator[None]:
        """Context in which calls of the model call its compiled regions."""
        before = [names.get(name) for names, name, _ in self._calls]
        with torch._dynamo.config.patch(recompile_limit=MOST_SHAPES):
            try:
                for names, name, call in self._calls:
                    names[name] = call
                yield
            finally:
                for (names, name, _), own in zip(self._calls, before, strict=True):
                    if own is None:
                        del names[name]
                    else:
                        names[name] = own


def _regions(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Children of the model's layers, or of their attention, that take no cache, and have weights
    and the `forward` of their class.
    """
    for layer in model.modules():
        if type(layer).__name__ not in (model._no_split_modules or ()):
            continue
        for child in layer.children():
            takes = inspect.signature(child.forward).parameters
            has_cache = "past_key_values" in takes or "layer_past" in takes
            for one in child.children() if has_cache else [child]:
                if "forward" not in vars(one) and _weights(one):
                    yield one


def _weights(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


class Inputs(NamedTuple):
    """Tensors of a step that change from one to the next."""

    ids: Tensor  # [B, 1] int64
    counts: Tensor  # as of `Pass`


class Graph(NamedTuple):
    """Step that was recorded. `replay` makes it with the present contents of its inputs: logits [B,
    V], overwritten by the next.
    """

    inputs: Inputs
    replay: Callable[[], Tensor]
    pool: Any = None  # memory that it shares with others


Run = Callable[[Inputs], Tensor]

NOT_RECORDED = "steps of this model are not captured, as one could not be recorded"
ON_HOST = "steps of a memory on the host are not captured"

MOST_GRAPHS = 16
EVERY = 32  # steps between two comparisons of the whole model


def record_cuda_graph(run: Run, inputs: Inputs, pool: Any) -> Graph:
    """Record a step as a CUDA graph. It is made three times, which changes nothing: it writes the
    same entries into the same slots.

    Args:
        pool: memory of what lies between the input and the output of other graphs, of which one is
            replayed at a time; None: a new one.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries allocate what they need before it is recorded
        for _ in range(2):
            run(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        logits = run(inputs)

    def replay() -> Tensor:
        graph.replay()
        return logits

    return Graph(inputs, replay, graph.pool())


@final
class Captured(Stepper):
    """Decode steps of a model that are captured (`not_captured` says which are not).

    Args:
        regions: those of the model that are compiled; None: none.
        record: records a step as a graph.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        regions: Regions | None = None,
        record: Callable[[Run, Inputs, Any], Graph] = record_cuda_graph,
    ):
        self.model, self.regions, self.record = model, regions, record
        self.graphs: OrderedDict[Any, Graph | None] = OrderedDict()  # None: seen once
        self.is_refused = False  # something in a step cannot be recorded
        self._is_on_host = False  # a memory was
        self._next: tuple[Pass | None, Graph | None] = None, None  # with its counts
        self._snapshot, self._num, self._modules = Snapshot(model), 0, [*model.modules()]

    @classmethod
    def ready(cls, method: Method) -> Self | None:
        if not isinstance(method, Cached) or method.model.device.type != "cuda":
            return None
        if why := not_captured(method):
            log.info("steps are not captured: %s", why)
            return None
        return cls(method.model)

    @classmethod
    def compiling(cls, method: Method, **options: Any) -> Stepper | None:
        if isinstance(method, Cached) and not_captured(method):
            return Compiled.compiling(method, **options)
        return cls(method.model, Regions(method.model, **options) if has_compiler() else None)

    def is_static(self, cache: Any) -> bool:
        return isinstance(cache, StreamingCache) and may_be_static(cache)

    def word_for(self, num_rows: int) -> str | None:
        if self.is_refused or self._is_on_host:
            return None
        return "captured" if self.regions is None else "compiled and captured"

    def logits(self, ids: Tensor, cache: StreamingCache) -> Tensor | None:
        step = cache.step
        assert step is not None
        self._forget_if_changed()
        (next_step, graph), self._next = self._next, (None, None)
        if graph is None or next_step is not step:
            if (graph := self._graph_for(ids, step, cache)) is None:
                return None
            _copy_counts(step, graph)
        graph.inputs.ids.copy_(ids)
        return graph.replay().clone()

    def prepare_next(self, cache: StreamingCache) -> None:
        step = cache.begin_next()
        if (graph := self.graphs.get(_key_of(step, cache))) is not None:
            _copy_counts(step, graph)
            self._next = step, graph

    def _graph_for(self, ids: Tensor, step: Pass, cache: StreamingCache) -> Graph | None:
        """Graph of a step; None if it is not captured, or comes for the first time: what never
        comes again is not worth one.
        """
        if self.is_refused:
            return None
        # Where entries are not written as they come, rows must have the same positions.
        if not (step.is_static and step.is_decode and (stays(cache) or step.is_alike)):
            return None
        if (memory := cache.memory) is not None:
            if not (memory.is_on_card or self._is_on_host):
                self._is_on_host = True
                log.warning(ON_HOST)
            if not (memory.is_on_card and (memory.finds_all(step) or memory.finds_none(step))):
                return None
        key = _key_of(step, cache)
        if key not in self.graphs:
            self.graphs[key] = None
            while len(self.graphs) > MOST_GRAPHS:
                self.graphs.popitem(last=False)
            return None
        self.graphs.move_to_end(key)
        if self.graphs[key] is None:
            own = Inputs(ids.clone(), step.counts.to(ids.device, copy=True))
            try:
                self.graphs[key] = self._captured(own, cache)
            except RuntimeError as error:  # it reads a number of the card, say
                self.is_refused = True
                log.warning("%s: %s", NOT_RECORDED, next(iter(str(error).splitlines()), ""))
        return self.graphs[key]

    def _captured(self, inputs: Inputs, cache: StreamingCache) -> Graph:
        step = cache.step
        assert step is not None

        def run(buffers: Inputs) -> Tensor:
            cache.step = replace(step)
            cache.step.counts = buffers.counts
            position_ids = described(cache).position_ids
            return last_logits(self.model, buffers.ids, cache, position_ids=position_ids)

        others = (graph.pool for graph in self.graphs.values() if graph is not None)
        compiled = nullcontext() if self.regions is None else self.regions.called()
        with without_padding(self.model), in_eval_mode(self._modules), compiled:
            try:
                return self.record(run, inputs, next(others, None))
            finally:
                cache.step = step

    def _forget_if_changed(self) -> None:
        """Forget all graphs if the model is not as it was."""
        self._num += 1
        snapshot = self._snapshot
        if not (snapshot.holds() if self._num % EVERY == 1 else snapshot.code_holds()):
            self.graphs.clear()
            self._next = None, None
            self._snapshot = Snapshot(self.model)


def not_captured(method: Cached) -> str | None:
    """Reason for which the steps of a method are not captured; None: they are."""
    cache, devices = method.cache, {x.device for x in method.model.parameters()}
    if len(devices) > 1:
        return "the model lies on several devices"
    if not method.sizes.is_oldest:
        return f"each step of policy {method.sizes.policy} does something else"
    if not may_be_static(cache):
        return "attention goes by the order of entries, takes no marks, or is not in all layers"
    return None


def _copy_counts(step: Pass, graph: Graph) -> None:
    """Copy them to where the graph reads them. Nobody waits for it: pinned memory is not used again
    before the copy was made.
    """
    there = graph.inputs.counts
    counts = step.counts.pin_memory() if there.is_cuda else step.counts
    there.copy_(counts, non_blocking=True)


def _key_of(step: Pass, cache: StreamingCache) -> tuple[Any, ...]:
    """All that a captured step depends on, beside the contents of tensors."""
    rings = (ring for layer in cache.attention for ring in layer.rings)
    stored = [x for ring in rings for x in ring.data]
    if (memory := cache.memory) is not None:
        stored += (x for of_layer in memory.of.values() for x in of_layer.entries)
    buffers = [x.data_ptr() for x in stored]
    sinks = [x.data_ptr() for x in cache.sinks.by_device.values()]
    first = (step.first_place, None if step.hides else step.births[0]) if step.is_alike else None
    of_rows = len(step.seen), step.is_even, step.is_alike, step.hides, step.size, first
    realigner = cache.realigner, cache.realigner.version
    found = memory and (memory.finds_all(step), memory.finds_none(step))
    return (*of_rows, step.sizes, found, *realigner, *buffers, *sinks)


@contextmanager
def without_padding(model: PreTrainedModel) -> Iterator[None]:
    """Context in which transformers does not look at ids to warn of padding."""
    config, before = model.config, getattr(model.config, "pad_token_id", None)
    config.pad_token_id = None
    try:
        yield
    finally:
        config.pad_token_id = before
