"""Layer of a hybrid model that has a state instead of entries: a convolution's last inputs, or a
recurrence. Nothing of it is evicted; it continues with the stream.
"""

from collections.abc import Sequence
from typing import Any, Self, final

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from kvalign.cache.layer import Part
from kvalign.cache.saving import expect_tensor
from kvalign.models.wrapped import in_eval_mode


@final
class StateLayer(LinearAttentionLayer, Part):
    """State that transformers updates; its rows are selected and joined here."""

    def reset(self) -> None:
        LinearAttentionLayer.__init__(self, self.number_of_states)

    def select(self, rows: Tensor) -> None:
        for name, x in self.state().items():
            self._take(name, x[rows.to(x.device)])

    def join(self, layers: Sequence[Self]) -> None:
        states = [layer.state() for layer in layers]
        for name in states[0]:
            self._take(name, torch.cat([state[name] for state in states]))

    def state(self) -> dict[str, Tensor]:
        """State tensors [B, ...] by name."""
        return _states(self)

    def restore(self, state: dict[str, Tensor], num_rows: int, like: LinearAttentionLayer) -> None:
        """Restore `state` for so many rows. A layer of the same model that has been fed provides
        the expected shapes.
        """
        for name, x in _states(like).items():
            tensor = expect_tensor(state, name, (num_rows, *x.shape[1:]), x.dtype)
            self._take(name, tensor.to(x.device, copy=True))

    def _take(self, name: str, x: Tensor) -> None:
        kind, i = name.split(".")
        self.lazy_initialization(**{f"{kind}_states": x}, state_idx=int(i))
        getattr(self, f"{kind}_states")[int(i)].copy_(x)
        self.has_previous_state[int(i)] = True


def _states(layer: LinearAttentionLayer) -> dict[str, Tensor]:
    kinds = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
    return {
        f"{kind}.{i}": x
        for kind, states in kinds.items()
        for i, x in states.items()
        if x is not None
    }


@torch.no_grad()
def restore_states(
    layers: Sequence[Any], state: dict[str, Tensor], num_rows: int, model: PreTrainedModel
) -> None:
    """Restore the state of the cache's layers that have one from `state`, checked against
    transformers' own cache after one token.
    """
    cache = DynamicCache(config=model.config)
    ids = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with in_eval_mode([*model.modules()]):
        model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
    for i, (layer, like) in enumerate(zip(layers, cache.layers, strict=True)):
        if isinstance(layer, StateLayer):
            prefix = f"{i}."
            own = {x.removeprefix(prefix): state[x] for x in state if x.startswith(prefix)}
            layer.restore(own, num_rows, like)
