"""Form in which a cache stores entries: numbers of the model's dtype, or of 8 bits.

    int8    [ D numbers from -127 to 127 | 4 bytes: their scale in float32 ]    x = scale * number

Each key and each value of an entry and a head has a scale of its own, made once from its greatest
number. Keys are stored bare (`bare_keys.py`), so nothing is ever rounded again.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.aligners.entries import KV
from kvalign.cache.bare_keys import At, BareKeys
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.autograd import no_autograd_modes
from kvalign.models import attention, kernel
from kvalign.models.architectures import rotation_of, window_of

_SCALE = 4  # bytes
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Form:
    """Form of stored keys and values.

    Args:
        dtype: of entries as attention reads them.
        is_int8: whether they are stored in 8 bits.
        bare: what 8 bits hold of keys.
    """

    dtype: torch.dtype
    is_int8: bool
    bare: BareKeys = field(default_factory=BareKeys)

    @property
    def stored_dtype(self) -> torch.dtype:
        return torch.int8 if self.is_int8 else self.dtype

    def width(self, head_dim: int) -> int:
        """Stored numbers of a key or a value."""
        return head_dim + _SCALE * self.is_int8

    @no_autograd_modes()
    def empty(self, like: Tensor, length: int) -> Tensor:
        """Room for so many entries beside one another, like these [..., S, D]."""
        shape = (*like.shape[:-2], length, self.width(like.shape[-1]))
        return like.new_zeros(shape, dtype=self.stored_dtype)

    def encode(self, x: Tensor) -> Tensor:
        """Keys or values [..., D] as they are stored, [..., width]; in floats they stay as they are
        and are cast where they are written.
        """
        if not self.is_int8:
            return x
        x = x.detach().float()
        scale = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True) / 127
        numbers = (x / scale.clamp_min(_TINY)).round_().to(torch.int8)
        return torch.cat([numbers, scale.view(torch.int8)], -1)

    def decode(self, stored: Tensor) -> Tensor:
        """Values, or keys as they are bare, [..., D] from what is stored: a view, or what int8
        stands for.
        """
        if not self.is_int8:
            return stored
        return (stored[..., :-_SCALE] * _scales(stored)).to(self.dtype)

    def encode_at(self, entries: KV, at: At) -> KV:
        """Entries [B, H, S, D] with keys at these positions, as they are stored."""
        if not self.is_int8:
            return entries
        keys = self.bare.of(entries.keys.detach(), at)
        return KV(keys, entries.values).map(self.encode)

    def decode_at(self, stored: KV, at: At) -> KV:
        """Entries [B, H, S, D] with keys at these positions, from what is stored."""
        if not self.is_int8:
            return stored
        bare = stored.keys[..., :-_SCALE] * _scales(stored.keys)
        return KV(self.bare.placed(bare, at).to(self.dtype), self.decode(stored.values))


def form_of(sizes: CacheSizes, dtype: torch.dtype, bare: BareKeys | None = None) -> Form:
    """Form of the entries of a cache, for a model of this dtype."""
    return Form(dtype, sizes.cache_dtype == "int8", bare or BareKeys())


def is_finite(stored: Tensor) -> bool:
    """Return whether all scales of int8 are numbers."""
    return bool(_scales(stored).isfinite().all())


def _scales(stored: Tensor) -> Tensor:
    if stored.shape[-1] % _SCALE:
        return stored[..., -_SCALE:].contiguous().view(torch.float32)
    return stored.view(torch.float32)[..., -1:]


def is_read_by_kernel(model: PreTrainedModel, keys: Tensor) -> bool:
    """Return whether our kernel attends to such stored keys [B, H, S, D] instead of the model."""
    form = Form(model.dtype, is_int8=keys.dtype == torch.int8)
    return (
        model.config.model_type in attention.REGISTERED
        and window_of(model.config) is None
        and keys.shape[3] in map(form.width, kernel.DIMS)
        and model.dtype == torch.float32
        and kernel.is_here()
        and (keys.dtype != torch.int8 or kernel.can_turn(rotation_of(model)))
    )
