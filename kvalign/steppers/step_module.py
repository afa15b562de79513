"""Decode step of a model as a function of tensors, which `stored.py` compiles."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kvalign.aligners.entries import KV
from kvalign.aligners.table import TABLES, TableAligner
from kvalign.cache.int8 import Int8, is_read_by_kernel, key_bases
from kvalign.cache.layer import Form
from kvalign.models import attention, kernel
from kvalign.models.architectures import rotation_of, spec_of
from kvalign.models.rope import Rotation


class StepLayer(CacheLayerMixin):
    """Given slots, one of which is written; `read` is attention by our kernel."""

    def __init__(
        self,
        entries: KV,
        form: Form,
        slot: Tensor,
        position_ids: Tensor,
        at_slots: Tensor,
        anchor: Callable[[KV], KV] | None,
        read: Callable[..., Tensor] | None,
    ):
        self.entries, self.length, self.is_initialized = entries, entries[0].shape[2], True
        self.form, self.slot, self.anchor, self.read = form, slot, anchor, read
        self.at, self.at_slots = position_ids[:, None], at_slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        new = KV(key_states, value_states)
        stored = self.form.encode_at(self.anchor(new) if self.anchor else new, self.at)
        for x, own in zip(self.entries, stored, strict=True):
            x.index_copy_(2, self.slot, own)
        if self.read is None:
            return self.form.decode_at(self.entries, self.at_slots)
        attention.mark(self.entries[0], self.read)
        return self.entries

    def get_seq_length(self) -> int:
        return self.length - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class StepModule(nn.Module):
    """Step as a function of tensors only.

    Args:
        model: whose step it is.
        is_int8: whether entries have 8 bits.
        table: places entries when they are read, each at its position; None: nothing does.
        num_sinks: entries at the first places, which have no table.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        is_int8: bool = False,
        table: TableAligner | None = None,
        num_sinks: int = 0,
    ):
        super().__init__()
        self.model, self.is_int8, self.table, self.num_sinks = model, is_int8, table, num_sinks
        self._layouts: list[str | None] = []
        if not is_int8:
            return
        rotation, bases = rotation_of(model), key_bases(model) if table is None else {}
        for i in range(spec_of(model.config).num_layers):
            one = None if rotation is None else rotation.at(i)
            self._layouts.append(None if one is None else one.layout)
            self.register_buffer(f"inv_freq_{i}", None if one is None else one.inv_freq)
            self.register_buffer(f"base_{i}", bases.get(i))

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by their names."""
        named = [
            *self.named_parameters(remove_duplicate=False),
            *self.named_buffers(remove_duplicate=False),
        ]
        return {name: x.detach() for name, x in named}

    def _form(self, layer_idx: int) -> Form:
        if not self.is_int8:
            return Form(self.model.dtype)
        layout = self._layouts[layer_idx]
        inv_freq, base = (getattr(self, f"{x}_{layer_idx}") for x in ("inv_freq", "base"))
        rotation = None if layout is None else Rotation(inv_freq, layout=layout)
        return Int8(self.model.dtype, rotation, base)

    def _anchor(self, layer_idx: int, births: Tensor, new: KV) -> KV:
        """New entries [B, H, 1, D] without their places [B]; rows take the place of entries."""
        assert self.table is not None
        rows = new.map(lambda x: x.transpose(0, 2))
        anchored = self.table.anchor(layer_idx, rows, births, True)
        return anchored.map(lambda x: x.transpose(0, 2))

    def _attend(
        self,
        layer_idx: int,
        form: Form,
        places: Tensor,
        behind: Tensor,
        angles: Tensor | None,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
    ) -> Tensor:
        """Attention of queries [B, H, 1, D] by our kernel: [B, 1, H, D]."""
        if isinstance(form, Int8) and form.rotation is not None:  # angles count from the first
            query = form.rotation.shift(query, behind)
        tables = None
        if self.table is not None:
            tables = [getattr(self.table, name)[layer_idx] for name in TABLES]
        output, _ = kernel.attend(
            places,
            query,
            keys,
            values,
            scale,
            angles=angles,
            bases=form.bases,
            tables=tables,
            num_sinks=self.num_sinks,
        )
        return output

    def forward(
        self, ids: Tensor, position_ids: Tensor, slot: Tensor, places: Tensor, *entries: Tensor
    ) -> Tensor:
        angles = entries[-1] if len(entries) % 2 else None
        behind = (position_ids - places.amax(1, keepdim=True))[:, None]
        is_ours, layers = is_read_by_kernel(self.model, entries[0]), []
        for i, pair in enumerate(zip(entries[::2], entries[1::2], strict=False)):
            form, at = self._form(i), (position_ids, places[:, None] + behind)
            anchor = None if self.table is None else partial(self._anchor, i, position_ids[:, 0])
            read = partial(self._attend, i, form, places, behind, angles) if is_ours else None
            layers.append(StepLayer(KV(*pair), form, slot, *at, anchor, read))
        cache = Cache(layers=layers)
        inputs = dict(past_key_values=cache, position_ids=position_ids, use_cache=True)
        return self.model(input_ids=ids, logits_to_keep=1, **inputs).logits
