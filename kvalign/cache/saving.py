"""State of a cache as named tensors, to be restored in a cache made with the same arguments."""

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.cache.bare_keys import BareKeys
from kvalign.cache.form import form_of, is_finite
from kvalign.cache.rows import Rows
from kvalign.cache.saved import expect_tensor
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.state_layer import restore_states
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import spec_of

_OLDER = {
    new.format(j): old.format(j)
    for new, old in (("bare.{}", "entries.{}"), ("bare_sinks.{}", "sinks.{}"))
    for j in range(2)
}
"""Names that 8 bits had in version 0.2, where keys were not bare."""


class Saving(Rows):
    """Saving and restoring of a cache."""

    attention: list[Any]
    sizes: CacheSizes
    frame: CacheSizes
    end: int

    @abstractmethod
    def bare_keys(self, layer_idx: int) -> BareKeys:
        """Form of a layer's keys in 8 bits."""

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
        tensors = {"seen": torch.tensor(self.seen), "end": torch.tensor([self.end])}
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
        stored = max(map(self.sizes.num_stored, seen))
        # Version 0.2 had no ring: there the order of time is that of the slots.
        end = expect_tensor(state, "end", (1,), torch.int64).item() if "end" in state else stored
        if not stored <= end < 2**62:
            raise UserError(f"a stream's end must be at least {stored}, its entries, found {end}")
        self.end = int(end)
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
                is_older = dtype == torch.int8 and f"{i}.bare.0" not in state
                given = _OLDER.get(name, name) if is_older else name
                tensor = expect_tensor(state, f"{i}.{given}", of_rows, dtype)
                if dtype == torch.int8 and not is_finite(tensor):
                    raise UserError(f"a stream's {i}.{given} has scales that are not finite")
                if is_older and name.endswith(".0"):
                    tensor = self._bare(i, name, tensor, seen)
                return tensor.to(device or model.device)

            layer.restore(read, seen, spec.head_dim, model.dtype)
        self._hold(seen)

    def _bare(self, layer_idx: int, name: str, keys: Tensor, seen: list[int]) -> Tensor:
        """Stored form of the keys of a layer that were stored with their rotation and base."""
        bare, at = self.bare_keys(layer_idx), torch.arange(keys.shape[2])
        form = form_of(self.sizes, torch.float32, bare)
        if name.startswith("memory"):
            form = replace(form, bare=replace(bare, rotation=None))
        elif name.startswith("bare."):
            ends = torch.tensor([n - self.frame.num_moved(n) for n in seen])[:, None, None]
            at = ends + torch.arange(-keys.shape[2], 0)
        return form.encode(form.bare.of(form.decode(keys), at))
