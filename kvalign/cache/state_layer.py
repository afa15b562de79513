"""Layer of a hybrid model that has a state instead of entries: a convolution's last inputs, or a
recurrence. Nothing of it is evicted; it continues with the stream.
"""

from collections.abc import Sequence
from typing import Self, final

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from kvalign.cache.layer import Part


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
        kinds = {"conv": self.conv_states, "recurrent": self.recurrent_states}
        return {
            f"{kind}.{i}": x
            for kind, states in kinds.items()
            for i, x in states.items()
            if x is not None
        }

    def restore(self, state: dict[str, Tensor], device: torch.device) -> None:
        """Restore `state`."""
        for name, x in state.items():
            self._take(name, x.to(device, copy=True))

    def _take(self, name: str, x: Tensor) -> None:
        kind, i = name.split(".")
        self.lazy_initialization(**{f"{kind}_states": x}, state_idx=int(i))
        getattr(self, f"{kind}_states")[int(i)].copy_(x)
        self.has_previous_state[int(i)] = True
