"""State of a cache as named tensors, to be restored in a cache made with the same arguments."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.cache.form import is_finite
from kvalign.cache.rows import Rows
from kvalign.cache.saved import expect_tensor
from kvalign.cache.state_layer import restore_states
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import spec_of


class Saving(Rows):
    """Saving and restoring of a cache."""

    attention: list[Any]

    @abstractmethod
    def reset(self) -> None:
        """Forget everything."""

    def state(self) -> dict[str, Tensor]:
        """State of the cache as tensors by name; `restore` of a cache made with the same arguments
        continues from it.
        """
        if not self.seen:
            return {}
        with self.changing():
            self.settle()
        tensors = {"seen": torch.tensor(self.seen)}
        for i, layer in enumerate(self.layers):
            tensors |= {f"{i}.{name}": x for name, x in layer.state().items()}
        return tensors

    def restore(self, state: dict[str, Tensor], model: PreTrainedModel) -> None:
        """Restore a `state`; UserError if it does not fit this cache or this model."""
        self.reset()
        if not state:
            return
        with self.changing():
            self._restore(state, model)

    def _restore(self, state: dict[str, Tensor], model: PreTrainedModel) -> None:
        num_rows = state["seen"].numel() if "seen" in state else 0
        seen = expect_tensor(state, "seen", (num_rows,), torch.int64).tolist()
        if not all(0 < n < 2**62 for n in seen) or not seen:
            raise UserError("each row of a stream must have at least one token")
        spec = spec_of(model.config)
        restore_states(self.layers, state, num_rows, model)
        for layer in self.attention:
            i = layer.layer_idx

            def read(
                name: str,
                shape: tuple[int, ...],
                dtype: torch.dtype,
                device: str | None = None,
                i: int = i,
            ) -> Tensor:
                of_rows = (num_rows, spec.num_kv_heads, *shape)
                tensor = expect_tensor(state, f"{i}.{name}", of_rows, dtype)
                if dtype == torch.int8 and not is_finite(tensor):
                    raise UserError(f"a stream's {i}.{name} has scales that are not finite")
                return tensor.to(device or model.device)

            layer.restore(read, seen, spec.head_dim, model.dtype)
        self._hold(seen)
