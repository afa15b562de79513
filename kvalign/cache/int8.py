"""Form of entries in 8 bits.

    int8    [ D numbers from -127 to 127 | 4 bytes: their scale in float32 ]    x = scale * number

Each key and each value of an entry and a head has a scale of its own, made once from its greatest
number. Keys are stored *bare*: without the rotation of their position, and without a base.

    key at position p = R(p) (base + what is stored)

So an entry is rounded once, and in one way: whether a step, a prefill chunk or a segment wrote it,
and wherever it is read later. The base is the key that a head gives for an input of zeros: a key
bias. In some models (Qwen2) it is many times as large as the rest, which one scale could not hold
beside it.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvalign.aligners.entries import KV
from kvalign.cache.layer import At, Form
from kvalign.cache.realigner import Realigner
from kvalign.cache.saving import expect_tensor
from kvalign.foundation.errors import UserError
from kvalign.models import kernel
from kvalign.models.architectures import REGISTERED, rotation_of, spec_of, window_of
from kvalign.models.rope import Rotation
from kvalign.models.wrapped import in_eval_mode, no_autograd_modes

_SCALE = 4  # bytes
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Int8(Form):
    """Form of stored keys and values: numbers of 8 bits.

    Args:
        dtype: of entries as attention reads them.
        rotation: of the layer's keys; None if they do not rotate.
    """

    dtype: torch.dtype
    rotation: Rotation | None = None
    base: Tensor | None = None

    is_int8 = True
    names = ("bare", "bare_sinks")
    stored_dtype = torch.int8

    @classmethod
    def of_layer(
        cls, dtype: torch.dtype, layer: int, realigner: Realigner, bases: dict[int, Tensor] | None
    ) -> Self:
        """Form of a layer's entries, of bases [H, 1, D]. Keys that a table reads have no base."""
        rotation, is_read = realigner.rotation, realigner.strategy == "read"
        base = None if bases is None or is_read else bases.get(layer)
        return cls(dtype, None if rotation is None else rotation.at(layer), base)

    def without_position(self) -> Self:
        return replace(self, rotation=None)

    def bare(self, keys: Tensor, at: At) -> Tensor:
        """Stored form of keys [..., H, S, D] at these positions, in float32."""
        keys = keys.float()
        if self.rotation is not None:
            keys = self.rotation.angles_to(at, keys.device).inverse.rotate(keys)
        return keys if self.base is None else keys - self.base.to(keys.device)

    def placed(self, bare: Tensor, at: At) -> Tensor:
        """Keys at these positions, from what is stored of them, [..., H, S, D] float32."""
        if self.base is not None:
            bare = bare + self.base.to(bare.device)
        return (
            bare if self.rotation is None else self.rotation.angles_to(at, bare.device).rotate(bare)
        )

    def width(self, head_dim: int) -> int:
        return head_dim + _SCALE

    def encode(self, x: Tensor) -> Tensor:
        x = x.detach().float()
        scale = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True) / 127
        numbers = (x / scale.clamp_min(_TINY)).round_().to(torch.int8)
        return torch.cat([numbers, scale.view(torch.int8)], -1)

    def decode(self, stored: Tensor) -> Tensor:
        return (stored[..., :-_SCALE] * _scales(stored)).to(self.dtype)

    def encode_at(self, entries: KV, at: At) -> KV:
        keys = self.bare(entries.keys.detach(), at)
        return KV(keys, entries.values).map(self.encode)

    def decode_at(self, stored: KV, at: At) -> KV:
        bare = stored.keys[..., :-_SCALE] * _scales(stored.keys)
        return KV(self.placed(bare, at).to(self.dtype), self.decode(stored.values))

    def read(
        self, state: dict[str, Tensor], layer: int, name: str, shape: tuple[int | None, ...]
    ) -> Tensor:
        """Tensor [*shape] of a layer's saved state; UserError if its scales are not finite."""
        full = f"{layer}.{name}"
        tensor = expect_tensor(state, full, shape, torch.int8)
        if not _scales(tensor).isfinite().all():
            raise UserError(f"a stream's {full} has scales that are not finite")
        return tensor


def _scales(stored: Tensor) -> Tensor:
    if stored.shape[-1] % _SCALE:
        return (
            stored[..., -_SCALE:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        )
    return stored.view(torch.float32)[..., -1:]


_BASES: WeakKeyDictionary[PreTrainedModel, dict[int, Tensor]] = WeakKeyDictionary()


def key_bases(model: PreTrainedModel) -> dict[int, Tensor]:
    """Return the bases [H, 1, D] of a model's keys, by layer, measured at first use."""
    if model not in _BASES:
        _BASES[model] = _measure(model)
    return _BASES[model]


@no_autograd_modes()
def _measure(model: PreTrainedModel) -> dict[int, Tensor]:
    cache = DynamicCache(config=model.config)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with ExitStack() as hooks, in_eval_mode([*model.modules()]):
        for module in model.modules():
            if "Attention" in type(module).__name__:
                hook = module.register_forward_pre_hook(_of_zeros, with_kwargs=True)
                hooks.callback(hook.remove)
        model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
    keys = {i: cache.layers[i].keys[0].float() for i in spec_of(model.config).attention}
    return {i: x.clone() for i, x in keys.items() if x.any() and x.isfinite().all()}


def _of_zeros(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call of an attention module, with zeros for its hidden states."""
    if "hidden_states" in kwargs:
        zeros = torch.zeros_like(kwargs["hidden_states"])
        return args, kwargs | {"hidden_states": zeros}
    return (torch.zeros_like(args[0]), *args[1:]), kwargs


def is_read_by_kernel(model: PreTrainedModel, keys: Tensor) -> bool:
    """Return whether our kernel attends to such stored keys [B, H, S, D] instead of the model."""
    is_int8 = keys.dtype == torch.int8
    form = Int8(model.dtype) if is_int8 else Form(model.dtype)
    return (
        model.config.model_type in REGISTERED
        and window_of(model.config) is None
        and keys.shape[3] in map(form.width, kernel.DIMS)
        and model.dtype == torch.float32
        and kernel.is_here()
        and (not is_int8 or kernel.can_rotate(rotation_of(model)))
    )
