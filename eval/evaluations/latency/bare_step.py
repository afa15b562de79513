"""Bare step: the cost of a step without any work on the cache.

It is one pass of the model over one token per row, with a buffer of C + 1 entries in each layer,
one of which is overwritten. It is the lower bound for methods that see C + 1 entries per step; it
streams nothing.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvalign.cache.sizes import CacheSizes
from kvalign.eval.protocol.evaluation import FLOOR
from kvalign.methods.base import Method, last_logits
from kvalign.steppers.captured import Graph, Inputs, Regions, record_cuda_graph, without_padding
from kvalign.steppers.compiled import has_compiler


class BareStep(Method):
    """Bare step in the form of a method, to be timed among them; `make_method` does not know it.

    Args:
        captured: whether it is captured, and `compiled` whether regions of the model are compiled
            before, as those of methods are.
    """

    name = FLOOR
    about = "one pass over C + 1 entries, nothing evicted: a lower bound, not a method"

    def __init__(
        self,
        model: PreTrainedModel,
        cache_size: int,
        compiled: bool = False,
        captured: bool = False,
    ):
        super().__init__(model, CacheSizes(cache_size, num_sinks=0))
        self.regions = Regions(model) if compiled and has_compiler() else None
        self.is_captured = captured
        self.reset()

    def reset(self) -> None:
        self.graph: Graph | None = None
        num_entries = self.sizes.first_input_len
        layers = [BareLayer(num_entries) for _ in range(self.spec.num_layers)]
        self.cache = Cache(layers=layers)

    def feed(self, ids: Tensor) -> Tensor:
        """Read a first input, whose last C + 1 tokens fill the buffer, with zeros if it is shorter;
        after that one token per row, at position C, in place of the one before.
        """
        ids = ids[:, -self.sizes.first_input_len :]
        if ids.shape[1] > 1:
            return self.forward(ids, self.cache)
        return self._replay(ids) if self.is_captured else self._step(ids)

    @torch.no_grad()
    def _step(self, ids: Tensor) -> Tensor:
        with self.in_eval_mode():
            return last_logits(self.model, ids, self.cache)

    def _replay(self, ids: Tensor) -> Tensor:
        if self.graph is None:
            own = Inputs(ids.clone(), ids.new_empty(0))
            compiled = nullcontext() if self.regions is None else self.regions.called()
            with without_padding(self.model), compiled:
                self.graph = record_cuda_graph(lambda inputs: self._step(inputs.ids), own, None)
        self.graph.inputs.ids.copy_(ids)
        return self.graph.replay().clone()


class BareLayer(DynamicLayer):
    """Buffer of one layer: `keys` and `values` [B, H, C + 1, D], full from the first input on."""

    is_croppable = False

    def __init__(self, num_entries: int):
        super().__init__()
        self.num_entries = num_entries

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Overwrite the last entry with a token's [B, H, 1, D]; a first input makes the buffer."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            batch_size, num_heads, length, head_dim = key_states.shape
            shape = (batch_size, num_heads, self.num_entries, head_dim)
            self.keys, self.values = key_states.new_zeros(shape), value_states.new_zeros(shape)
            self.keys[:, :, :length] = key_states
            self.values[:, :, :length] = value_states
            self._last = self.keys[:, :, -1:], self.values[:, :, -1:]
            return key_states, value_states
        self._last[0].copy_(key_states)
        self._last[1].copy_(value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.num_entries - 1 if self.is_initialized else 0
