"""Weights from a safetensors file from outside. Names, shapes and types are compared with the
needed ones before any number is read, and every number must be finite.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvalign.foundation.errors import UserError

FLOATS = ("F64", "F32", "F16", "BF16")
_USUAL = (torch.float32, torch.float16, torch.bfloat16)


def read_weights(
    path: Path, shapes: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, Tensor]:
    """The tensors of a file, in float32.

    Args:
        shapes: of exactly the tensors that it must contain.
        where: owner of the weights, for messages.
    """
    try:
        file = safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read the weights of {where}: {error}") from None
    with file:
        names = set(file.keys())
        for name, shape in shapes.items():
            kind, sizes = "", "nothing"
            if name in names:
                claimed = file.get_slice(name)
                kind, sizes = claimed.get_dtype(), str(tuple(claimed.get_shape()))
            if sizes != str(tuple(shape)):
                raise UserError(f"{where}: {name} must be {tuple(shape)}, found {sizes}")
            if kind not in FLOATS:
                raise UserError(f"{where}: {name} must be of {', '.join(FLOATS)}, found {kind}")
        if unknown := sorted(names - shapes.keys()):
            raise UserError(f"{where}: unknown weights {unknown[0]!r:.80}")
        weights = {name: file.get_tensor(name).float() for name in shapes}
    check_finite(weights.items(), where)
    return weights


def check_finite(weights: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Raise UserError for the first non-finite weight."""
    for name, x in weights:
        # The extremes are not finite if any number is not, and are found faster than those.
        extremes = x.detach().aminmax() if x.numel() and x.dtype in _USUAL else (x,)
        if not all(torch.isfinite(one).all() for one in extremes):
            raise UserError(f"{where}: {name} is not finite")
