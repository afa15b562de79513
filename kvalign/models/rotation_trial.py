"""Measurement of a model's rotation: a pair of tokens is encoded at two offsets. The rotation is
what turns the first keys into the second, layer by layer.

The frequencies are the model's own. The measurement tells which layer rotates by which frequencies,
in which layout, or not at all. So no architecture must be known by name. If no rotation moves the
keys, the model is refused, with the difference.

Of an architecture that is known, layers of which the config says the same are alike. The pass then
ends after the first of each kind, and the one that reads its output.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from kvalign.foundation.autograd import no_autograd_modes
from kvalign.foundation.errors import UserError
from kvalign.models.rope import LAYOUTS, Rotation, RotationByLayer
from kvalign.models.wrapped import in_eval_mode

OFFSETS = (0, 37)
# Of the largest number of a key: what counts as equal, by the precision that it is stored in.
_NEAR = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 1e-2}
_NEAR_ELSE = 4e-2
# The second token of a pair sees the first: errors of all layers add up there.
_NEAR_AFTER = 5
_TABLE = "embed_positions"


class Still(Rotation):
    """Rotation of keys that do not rotate."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(0), is_bounded=False)

    def shift(self, keys: Tensor, shift: int | Tensor) -> Tensor:
        return keys


def frequencies(model: PreTrainedModel) -> dict[str, Tensor]:
    """Rotary frequencies [N] float32 of a model, by name: its own buffers, or those behind its
    tables of sines and cosines [P, 2 N] (GPT-J). Equal ones occur once.
    """
    by_path: dict[str, Tensor] = {}
    for path, buffer in model.named_buffers():
        name = path.rpartition(".")[2]
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq"):
            inv_freq = buffer.float()
        elif name == _TABLE and buffer.ndim == 2 and len(buffer) > 1:
            inv_freq = _of_table(buffer)
        else:
            continue
        if not any(torch.equal(inv_freq, other) for other in by_path.values()):
            by_path[path] = inv_freq
    return by_path


def _of_table(table: Tensor) -> Tensor:
    """The frequencies whose sines and cosines a table has: of each position twice as far the same
    error is half of what it was, in half precision too.
    """
    sin, cos = table.double().chunk(2, -1)
    inv_freq, position = torch.zeros_like(sin[0]), 1
    while position < len(table):
        off = torch.atan2(sin[position], cos[position]) - position * inv_freq
        inv_freq += torch.atan2(off.sin(), off.cos()) / position
        position *= 2
    return inv_freq.float()


class _Enough(Exception):  # noqa: N818  not an error
    """The first layers are encoded."""


class _FirstLayers(DynamicCache):
    """Cache that ends a pass in its layer `last`; None: in no layer."""

    def __init__(self, config: PretrainedConfig, last: int | None):
        super().__init__(config=config)
        self.last = last

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        entries = super().update(keys, values, layer_idx, *args, **kwargs)
        if layer_idx == self.last:
            raise _Enough
        return entries


@no_autograd_modes()
def measured(
    model: PreTrainedModel,
    kinds: Sequence[Any],
    attention: Sequence[int],
    context_len: int | None,
    is_bounded: bool,
) -> Rotation:
    """Measured rotation of the keys of a model.

    Args:
        kinds: of each layer; those that are equal are alike.
        attention: the layers that have keys.
        context_len: number of positions; None: no limit.
        is_bounded: see `Rotation`.
    """
    most = OFFSETS[-1] if context_len is None else min(OFFSETS[-1], context_len - 2)
    offsets = [min(offset, most) for offset in OFFSETS]
    firsts = [kinds.index(kind) for kind in kinds]
    last = next((i for i in attention if i > max(firsts)), None)
    cache, hidden = _encode(model, offsets, last)
    candidates: list[Rotation] = [
        Rotation(inv_freq, is_bounded or path.endswith(_TABLE), layout)
        for path, inv_freq in frequencies(model).items()
        for layout in LAYOUTS
    ]
    candidates.append(Still())
    by_layer: dict[int, Rotation] = {}
    for i in (i for i in attention if last is None or i <= last):
        layer = cache.layers[i]
        near = _near(layer.keys.dtype)
        candidates.sort(
            key=lambda one: one not in list(by_layer.values())[-1:]
        )  # as the layer before
        errors = []
        for one in candidates:
            errors.append(_error(one, layer.keys[:, :, 0], offsets))
            if errors[-1] < near:
                by_layer[i] = one
                break
        else:
            raise UserError(
                f"no rotation moves a key of layer {i}: {min(errors):.2g} of its size is the "
                f"smallest difference, among {len(candidates) - 1} rotations by the model's own "
                "frequencies"
            )
        if (apart := _apart(layer.values[:, :, 0])) > near:
            raise UserError(
                f"a value of layer {i} changes with the position, by {apart:.2g} of its size"
            )
    if hidden is None:
        assert last is not None
        hidden = cache.layers[last].values.transpose(1, 2)
    near = _NEAR_AFTER * _near(hidden.dtype)
    if (apart := _apart(hidden[:, 1])) > near:
        raise UserError(
            "the score of a token with the one before it changes with the position of the pair, by "
            f"{apart:.2g} of its size"
        )
    if len({*by_layer.values()}) == 1:
        return by_layer[attention[0]]
    still = Still()
    return RotationByLayer([by_layer.get(i, still) for i in firsts])


def _encode(
    model: PreTrainedModel, offsets: list[int], last: int | None
) -> tuple[DynamicCache, Tensor | None]:
    """The cache after two tokens at each offset, and what the model ends in [2, 2, N]; None if the
    pass ends in layer `last`.
    """
    device, vocab_size = model.device, model.config.vocab_size
    ids = torch.tensor([[vocab_size // 2, vocab_size // 3]], device=device).expand(len(offsets), -1)
    positions = torch.tensor(offsets, device=device)[:, None] + torch.arange(2, device=device)
    cache = _FirstLayers(model.config, last)
    try:
        with in_eval_mode([*model.modules()]):
            out = model.base_model(
                input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True
            )
    except _Enough:
        return cache, None
    return cache, out[0]


def _error(rotation: Rotation, keys: Tensor, offsets: list[int]) -> float:
    """Difference of keys [B, H, D] of one token once moved to the first of the offsets."""
    shift = torch.tensor(offsets, device=keys.device)[:, None]
    return _apart(rotation.shift(keys, shift - offsets[0]))


def _apart(x: Tensor) -> float:
    """The largest difference of rows from the first, as a part of the largest number; 0 where
    there is no telling.
    """
    x = x.float()
    apart = ((x - x[:1]).abs().amax() / x.abs().amax().clamp(min=1e-20)).item()
    return apart if apart == apart else 0.0


def _near(dtype: torch.dtype) -> float:
    return _NEAR.get(dtype, _NEAR_ELSE)
