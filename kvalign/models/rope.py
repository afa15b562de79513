"""Exact move of rotated keys: rotations add up, so rotating a key back moves it towards the start.

RoPE (Su et al. 2021) rotates pairs of numbers. The layout says which two numbers of a key are a
pair. A model's attention scaling (YaRN, LongRoPE) is already in its keys, and is not applied again.

How a model rotates is measured: a pair of tokens is encoded at two offsets. The rotation is what
turns the first keys into the second, layer by layer. The frequencies are the model's own. The
measurement tells which layer rotates by which frequencies, in which layout, or not at all. So no
architecture must be known by name. If no rotation moves the keys, the model is refused, with the
difference. Of an architecture that is known, layers of which the config says the same are alike.
The pass then ends after the first of each kind, and the one that reads its output.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from kvalign.foundation.errors import UserError
from kvalign.models.wrapped import in_eval_mode, no_autograd_modes

NUM_SHIFTS = 8
"""Number of whole shifts whose angles are cached."""


class Layout(NamedTuple):
    """Layout of the pairs among the D numbers of a key.

    Attributes:
        split: splits keys [..., D], given the number of pairs, into both numbers of each pair [...,
            N] and the unrotated rest.
        join: the inverse of split.
    """

    split: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
    join: Callable[[Tensor, Tensor, Tensor], Tensor]


LAYOUTS = {
    # Llama: half the rotary dimensions apart.
    "halves": Layout(
        lambda x, n: (x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]),
        lambda first, second, rest: torch.cat([first, second, rest], -1),
    ),
    # GPT-J: side by side.
    "neighbours": Layout(
        lambda x, n: (x[..., : 2 * n : 2], x[..., 1 : 2 * n : 2], x[..., 2 * n :]),
        lambda first, second, rest: torch.cat(
            [torch.stack([first, second], -1).flatten(-2), rest], -1
        ),
    ),
}
"""Layouts to try on a model."""


class Angles(NamedTuple):
    """Cosines and sines of a move, [rotary_dim / 2] or [..., S, rotary_dim / 2] float32."""

    cos: Tensor
    sin: Tensor
    layout: str = "halves"

    def rotate(self, keys: Tensor) -> Tensor:
        """Keys [..., S, D], moved."""
        split, join = LAYOUTS[self.layout]
        first, second, rest = split(keys, self.cos.shape[-1])
        first, second = first.float(), second.float()
        rotated = (first * self.cos - second * self.sin).to(keys.dtype)
        other = (second * self.cos + first * self.sin).to(keys.dtype)
        return join(rotated, other, rest.expand(*rotated.shape[:-1], -1))

    @property
    def inverse(self) -> "Angles":
        return Angles(self.cos, -self.sin, self.layout)

    def to(self, device: torch.device) -> "Angles":
        return Angles(self.cos.to(device), self.sin.to(device), self.layout)


class Rotation:
    """Rotation of the keys of one rotary model along positions.

    Attributes:
        inv_freq: [rotary_dim / 2] float32, the model's own frequencies, scaling included.
        is_bounded: whether the rotation changes or ends beyond the context length.
        layout: key of `LAYOUTS`.
    """

    def __init__(self, inv_freq: Tensor, is_bounded: bool = True, layout: str = "halves"):
        self.inv_freq, self.is_bounded, self.layout = inv_freq, is_bounded, layout
        self._angles: dict[tuple[int, torch.device], Angles] = {}
        self._from_start: dict[torch.device, Angles] = {}

    def at(self, layer: int) -> "Rotation":
        return self

    def angles(self, shift: Tensor) -> Angles:
        """Angles that move keys so many positions [..., S] towards the start."""
        angles = -shift.float()[..., None] * self.inv_freq.to(shift.device, torch.float32)
        return Angles(angles.cos(), angles.sin(), self.layout)

    def angles_to(self, at: slice | Tensor, device: torch.device) -> Angles:
        """Angles that move keys from position 0 to `at`, [..., S] or a slice of positions."""
        if isinstance(at, Tensor):
            return self.angles(-at.to(device))
        angles = self._from_start.get(device)
        if angles is None or len(angles.cos) < at.stop:
            with no_autograd_modes():
                num = 1 << max(10, (at.stop - 1).bit_length())  # seldom made anew
                positions = torch.arange(num, device=device)
                angles = self._from_start[device] = self.angles(-positions)
        return Angles(angles.cos[at], angles.sin[at], self.layout)

    def shift(self, keys: Tensor, shift: int | Tensor) -> Tensor:
        """Rotated keys [..., S, D], moved `shift` positions towards the start: one number for all
        entries or [..., S], negative: away from it. Numbers beyond the rotary ones (GPT-NeoX) stay.
        Angles and products are in float32; a shift of 0 returns the same numbers.
        """
        if isinstance(shift, Tensor):
            return self.angles(shift.to(keys.device)).rotate(keys)
        # All layers of a step ask for the same few.
        key = shift, keys.device
        angles = self._angles.get(key)
        if angles is None:
            if len(self._angles) >= NUM_SHIFTS:
                self._angles.clear()
            with no_autograd_modes():
                angles = self._angles[key] = self.angles(torch.tensor(shift, device=keys.device))
        return angles.rotate(keys)

    def shift_layers(self, keys: Tensor, shift: int | Tensor, dim: int) -> Tensor:
        """Same for the keys of all layers, stacked along `dim`."""
        return self.shift(keys, shift)


class RotationByLayer(Rotation):
    """Rotation of a model whose layers differ: some rotate faster, or not at all."""

    def __init__(self, layers: Sequence[Rotation]):
        self.layers, self.is_bounded = layers, any(layer.is_bounded for layer in layers)

    def at(self, layer: int) -> Rotation:
        return self.layers[layer]

    def shift_layers(self, keys: Tensor, shift: int | Tensor, dim: int) -> Tensor:
        pairs = zip(self.layers, keys.unbind(dim), strict=True)
        return torch.stack([layer.shift(x, shift) for layer, x in pairs], dim)


OFFSETS = (0, 37)
# Of the largest number of a key: what counts as equal, by the precision that it is stored in.
_NEAR = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 1e-2}
_NEAR_ELSE = 4e-2
# The second token of a pair sees the first: errors of all layers add up there.
_NEAR_AFTER = 5
_TABLE = "embed_positions"


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
    """Measured rotation of the keys of a model; UserError if they do not rotate evenly.

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
    still = Rotation(torch.zeros(0), is_bounded=False)  # of no pairs
    candidates.append(still)
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
    """The largest difference of rows from the first, in parts of the largest number, or 0."""
    x = x.float()
    apart = ((x - x[:1]).abs().amax() / x.abs().amax().clamp(min=1e-20)).item()
    return apart if apart == apart else 0.0


def _near(dtype: torch.dtype) -> float:
    return _NEAR.get(dtype, _NEAR_ELSE)
