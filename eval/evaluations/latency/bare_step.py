"""The bare step: what a step costs when there is nothing to do for the cache.

One pass of the model over one token a row, with a buffer of C + 1 entries a layer, one of which is
overwritten. A method that sees C + 1 entries a step can reach it and no more; it streams nothing.
"""

from typing import Any

from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvalign.aligners.base import KeysValues
from kvalign.cache.sizes import CacheSizes
from kvalign.eval.protocol.evaluation import FLOOR
from kvalign.methods.base import Method


class BareStep(Method):
    """Fed like a method, and timed among them; for `make_method` there is none of this name."""

    name = FLOOR
    about = "one pass over C + 1 entries, nothing evicted: a floor, no method"

    def __init__(self, model: PreTrainedModel, cache_size: int):
        super().__init__(model, CacheSizes(cache_size, num_sinks=0))
        self.reset()

    def reset(self) -> None:
        num_entries = self.sizes.first_input_len
        layers = [BareLayer(num_entries) for _ in range(self.spec.num_layers)]
        self.cache = Cache(layers=layers)

    def feed(self, ids: Tensor) -> Tensor:
        """A first input leaves its last C + 1 tokens in the buffer, and zeros where it is shorter;
        after that one token a row, at position C, in place of the one before.
        """
        return self.forward(ids[:, -self.sizes.first_input_len :], self.cache)


class BareLayer(DynamicLayer):
    """One layer's buffer: `keys` and `values` [B, H, C + 1, D], full from the first input on."""

    is_croppable = False

    def __init__(self, num_entries: int):
        super().__init__()
        self.num_entries = num_entries

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> KeysValues:
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
