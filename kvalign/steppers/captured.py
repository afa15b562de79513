"""Captured step: the kernels of a decode step on CUDA, recorded once and replayed without Python.

A CUDA graph runs the same kernels on the same addresses. In a ring nothing but tensors changes from
step to step (`kvalign.cache.step.DecodeStep`), so these are copied to where the graph reads them.
What differs otherwise has a graph of its own: another number of rows, a cache that is not full
(whose slots without an entry are hidden), other buffers.
"""

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, Self, final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.cache.base import FixedSizeCache
from kvalign.cache.step import DecodeStep, Step
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.methods.base import Method
from kvalign.methods.cached import Cached
from kvalign.methods.stepper import Stepper, last_logits
from kvalign.models.snapshot import Snapshot
from kvalign.steppers.compiled import Compiled

log = logging.getLogger(__name__)

Inputs = dict[str, Tensor]
Replay = Callable[[], Tensor]
Record = Callable[[Callable[[Inputs], Tensor], Inputs], Replay]
"""Of a step as a function of inputs, and the tensors that it will read them from: what makes the
step again with the present contents of these.
"""

MOST_GRAPHS = 16
EVERY = 32  # steps between two comparisons of the whole model


def record_cuda_graph(run: Callable[[Inputs], Tensor], inputs: Inputs) -> Replay:
    """Record a step as a CUDA graph. It is made three times, which changes nothing: it writes the
    same entries into the same slots.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries allocate what they need before it is recorded
        for _ in range(2):
            run(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_pool()):
        logits = run(inputs)

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


@functools.cache
def _pool() -> Any:
    """Memory of what lies between the input and the output of a step, for all graphs: one is
    replayed at a time, and its output copied.
    """
    return torch.cuda.graph_pool_handle()


@final
class Captured(Stepper):
    """Decode steps of a model that are captured: of entries that are neither in the order of time
    nor remembered, on one device, once all rows have their sinks.

    Args:
        call: the model, or its compiled form.
        record: how a step is captured.
    """

    is_static = True

    def __init__(
        self, model: PreTrainedModel, call: Any = None, record: Record = record_cuda_graph
    ):
        self.model, self.call, self.record = model, call or model, record
        self.graphs: OrderedDict[Any, tuple[Inputs, Replay]] = OrderedDict()
        self._seen: OrderedDict[Any, None] = OrderedDict()
        self._snapshot, self._num = Snapshot(model), 0

    @classmethod
    def ready(cls, method: Method) -> Self | None:
        if not isinstance(method, Cached) or method.model.device.type != "cuda":
            return None
        if why := not_captured(method):
            log.info("steps are not captured: %s", why)
            return None
        return cls(method.model)

    @classmethod
    def compiling(cls, method: Method, **options: Any) -> Self | None:
        return cls(method.model, Compiled.of(method.model, **options))

    def word_for(self, num_rows: int) -> str | None:
        return "captured" if self.call is self.model else "compiled and captured"

    def logits(self, ids: Tensor, cache: FixedSizeCache) -> Tensor | None:
        step = cache.step
        if step is None or not isinstance(cache, StreamingCache) or not _is_captured(step, cache):
            return None
        inputs, key = _inputs_of(ids, step), _key_of(ids, step, cache)
        self._forget_if_changed()
        if key not in self.graphs:
            if key not in self._seen:  # what differs at each step is not worth it
                self._seen[key] = None
                while len(self._seen) > MOST_GRAPHS:
                    self._seen.popitem(last=False)
                return None
            self.graphs[key] = self._captured(inputs, step, cache)
            while len(self.graphs) > MOST_GRAPHS:
                self.graphs.popitem(last=False)
        self.graphs.move_to_end(key)
        own, replay = self.graphs[key]
        for name, x in inputs.items():
            own[name].copy_(x)
        return replay().clone()

    def _captured(self, inputs: Inputs, step: Step, cache: StreamingCache) -> tuple[Inputs, Replay]:
        own = {name: x.clone() for name, x in inputs.items()}

        def run(given: Inputs) -> Tensor:
            cache.step = _with(step, given)
            told = {"position_ids": given["position_ids"]}
            return last_logits(self.call, given["ids"], cache, **told)

        with _without_padding(self.model):
            try:
                return own, self.record(run, own)
            finally:
                cache.step = step

    def _forget_if_changed(self) -> None:
        """Forget all graphs if the model is not as it was."""
        self._num += 1
        if not (self._snapshot if self._num % EVERY == 1 else self._snapshot.code).holds():
            self.graphs.clear()
            self._seen.clear()
            self._snapshot = Snapshot(self.model)


def not_captured(method: Cached) -> str | None:
    """Reason for which the steps of a method are not captured; None: they are."""
    cache, devices = method.cache, {x.device for x in method.model.parameters()}
    if len(devices) > 1:
        return "the model lies on several devices"
    if type(cache) is not StreamingCache:
        kind = "a memory" if method.sizes.memory else f"policy {method.sizes.policy}"
        return f"each step of {kind} does something else"
    if not cache.may_be_static:
        return "attention of this model goes by the order of entries, or takes no marks"
    return None


def _is_captured(step: Step, cache: StreamingCache) -> bool:
    decode = step.decode
    if decode is None or step.in_order or type(cache) is not StreamingCache:
        return False
    if decode.in_sight is not None:  # our kernel's steps, on a CPU
        return False
    writes_as_they_come = cache.stays or decode.birth is not None
    return writes_as_they_come and len(cache.attention) == len(cache.layers)


_SCALES = "scales"


def _inputs_of(ids: Tensor, step: Step) -> Inputs:
    """The tensors of a step, which change from one to the next."""
    decode = step.decode
    assert decode is not None
    own = {one.name: getattr(decode, one.name) for one in fields(DecodeStep)}
    found = {name: x for name, x in own.items() if isinstance(x, Tensor)}
    found |= {f"{_SCALES}.{i}": x for i, x in enumerate(decode.scales or ())}
    return {"ids": ids, "behind_rows": step.behind_rows} | found


def _with(step: Step, given: Inputs) -> Step:
    """The step with these tensors in place of its own."""
    decode = step.decode
    assert decode is not None
    own: dict[str, Any] = {x.name: given[x.name] for x in fields(DecodeStep) if x.name in given}
    if decode.scales is not None:
        own[_SCALES] = tuple(given[f"{_SCALES}.{i}"] for i in range(len(decode.scales)))
    return replace(step, behind_rows=given["behind_rows"], decode=replace(decode, **own))


def _key_of(ids: Tensor, step: Step, cache: StreamingCache) -> Any:
    """All that a captured step depends on, beside the contents of tensors."""
    decode = step.decode
    assert decode is not None
    own = {one.name: getattr(decode, one.name) for one in fields(DecodeStep)}
    kinds = ((name, x) for name, x in own.items() if name != _SCALES)
    of_decode = (str(x.shape) if isinstance(x, Tensor) else repr(x) for _, x in kinds)
    first = step.first_place if step.is_alike else None
    buffers = (x.data_ptr() for layer in cache.attention for ring in layer.rings for x in ring.data)
    realigner = cache.realigner, cache.realigner.version
    return (ids.shape, *of_decode, first, step.sizes, *realigner, *buffers)


@contextmanager
def _without_padding(model: PreTrainedModel) -> Iterator[None]:
    """Context in which transformers does not look at ids to warn of padding."""
    config, before = model.config, getattr(model.config, "pad_token_id", None)
    config.pad_token_id = None
    try:
        yield
    finally:
        config.pad_token_id = before
