"""State of a cache as tensors by name, from which a cache with the same arguments continues.
Entries are in it in the order of time, right-aligned.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.aligners.entries import KV
from kvalign.cache.layer import Form, ReadTensor, Ring
from kvalign.cache.passes import slots_of
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.cache.window_layer import WindowLayer
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import spec_of


def state_of(cache: StreamingCache) -> dict[str, Tensor]:
    """State of a cache that has been fed something."""
    with cache.changing():
        cache.settle()
    tensors = {"seen": torch.tensor(cache.seen), "end": torch.tensor([cache.end])}
    if any(cache.num_gone):
        tensors["gone"] = torch.tensor(cache.num_gone)
    for i, layer in enumerate(cache.layers):
        tensors |= {f"{i}.{name}": x for name, x in layer.state().items()}
    return tensors if cache.memory is None else tensors | cache.memory.state()


def restore(cache: StreamingCache, state: dict[str, Tensor], model: PreTrainedModel) -> None:
    """Restore a state of an empty cache; UserError if it does not fit this cache or this model."""
    if cache.memory is not None:
        cache.memory.begin_restore(state)
    num_rows = state["seen"].numel() if "seen" in state else 0
    seen = expect_tensor(state, "seen", (num_rows,), torch.int64).tolist()
    if min(seen, default=0) < 1:
        raise UserError("each row of a stream must have at least one token")
    stored = max(map(cache.sizes.num_stored, seen))
    num_gone = [0] * num_rows
    if "gone" in state:
        num_gone = expect_tensor(state, "gone", (num_rows,), torch.int64).tolist()
    cache.end = int(expect_tensor(state, "end", (1,), torch.int64))
    if min(num_gone) < 0 or cache.end < stored:
        raise UserError("a stream's numbers of tokens are inconsistent")
    spec = spec_of(model.config)
    if spec.states:
        from kvalign.cache.state_layer import restore_states

        restore_states(cache.layers, state, num_rows, model)
    for layer in cache.attention:
        i = layer.layer_idx

        def read(
            name: str,
            shape: tuple[int, ...],
            dtype: torch.dtype,
            device: torch.device | None = None,
            i: int = i,
        ) -> Tensor:
            of_rows = spec.of_entries(num_rows, *shape)
            if dtype == torch.int8:
                form: Any = cache.form(model.dtype, i)
                tensor = form.read(state, i, name, of_rows)
            else:
                tensor = expect_tensor(state, f"{i}.{name}", of_rows, dtype)
            return tensor.to(device or model.device)

        layer.restore(read, seen, spec.head_dim, model.dtype)
    cache._hold(seen, num_gone)


def window_state(layer: WindowLayer) -> dict[str, Tensor]:
    """State of sinks and a window."""
    num, num_sinks = layer.cache.num_stored, layer.sizes.num_sinks
    stored = torch.tensor([layer.sizes.num_stored(n) for n in layer.cache.seen])[:, None]
    is_missing = (torch.arange(num, 0, -1) > stored)[:, None, :, None].to(layer.device)
    is_no_sink = (torch.arange(num_sinks) >= stored)[:, None, :, None].to(layer.device)

    def of_rows(ring: Ring) -> KV:
        return layer.newest(ring, num).map(lambda x: x.masked_fill(is_missing, 0))

    layer.entries.grow(num_sinks)
    sinks = layer.stored_sinks(num_sinks).map(lambda x: x.masked_fill(is_no_sink, 0))
    tensors = dict(zip(layer.entries.form.names, (of_rows(layer.entries), sinks), strict=True))
    if layer.sources is not layer.entries:
        tensors["sources"] = of_rows(layer.sources)
    return {f"{name}.{j}": x for name, pair in tensors.items() for j, x in enumerate(pair)}


def restore_window(
    layer: WindowLayer, read: ReadTensor, seen: list[int], head_dim: int, dtype: torch.dtype
) -> None:
    """Restore the state of sinks and a window, of rows that have been fed so many tokens."""
    stored = [layer.sizes.num_stored(n) for n in seen]
    width, form = max(stored), layer.cache.form(dtype, layer.layer_idx)
    of_entries, of_sinks = form.names
    entries = read_kv(read, of_entries, width, head_dim, form)
    layer.lazy_initialization(*entries.slots(0, 0).map(form.decode))
    sinks = read_kv(read, of_sinks, layer.sizes.num_sinks, head_dim, form)
    if layer.cache.rotates_sinks:
        layer.sinks.of(layer.layer_idx, layer.device).copy_(sinks.keys)
    layer.entries.replace(_by_slot(layer, entries, stored))
    if layer.sources is not layer.entries:
        sources = read_kv(read, "sources", width, head_dim, layer.sources.form)
        layer.sources.replace(_by_slot(layer, sources, stored))
    if layer.memory is not None:
        layer.memory.restore(layer, read, seen, head_dim)


def _by_slot(layer: WindowLayer, entries: KV, stored: list[int]) -> KV:
    """Entries in the order of time, right-aligned, each in its slot."""
    end, num_sinks = layer.cache.end, layer.sizes.num_sinks
    width, num = max(stored), max(max(stored) - num_sinks, 0)
    num_slots = max(num_sinks, min(end, layer.sizes.first_input_len))
    data = entries.map(lambda x: x.new_zeros(*x.shape[:2], num_slots, x.shape[3]))
    data.put_at(
        slots_of(layer.sizes, end - num, num, layer.device), entries.slots(width - num, num)
    )
    for row, num_own in enumerate(stored):
        one, first = slice(row, row + 1), min(num_own, num_sinks)
        own = entries.rows(one).slots(width - num_own, first)
        data.rows(one).slots(0, first).put(own)
    return data


def read_kv(
    read: ReadTensor,
    name: str,
    length: int,
    head_dim: int,
    form: Form,
    device: torch.device | None = None,
) -> KV:
    """Entries of a saved state, `length` of them, as they are stored."""
    shape, dtype = (length, form.width(head_dim)), form.stored_dtype
    return KV(*(read(f"{name}.{j}", shape, dtype, device) for j in range(2)))


def expect_tensor(
    state: dict[str, Tensor], name: str, shape: tuple[int | None, ...], dtype: torch.dtype
) -> Tensor:
    """Tensor [*shape] of a state; UserError unless it is so (None: any size) and of this dtype."""
    tensor = state.get(name)
    found = () if tensor is None else tensor.shape
    is_other = len(found) != len(shape) or any(
        y not in (None, x) for x, y in zip(found, shape, strict=True)
    )
    if tensor is None or is_other or tensor.dtype != dtype:
        what = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
        raise UserError(f"a stream's {name} must be {shape} {dtype}, found {what}")
    return tensor
