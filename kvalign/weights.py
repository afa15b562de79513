"""Weights from outside, in a safetensors file: its names, shapes and types are compared with what
is needed before any number is read, and every number is finite.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvalign.errors import UserError

FLOATS = ("F64", "F32", "F16", "BF16")


def read_weights(
    path: Path, shapes: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, Tensor]:
    """The tensors of a file, in float32.

    Args:
        shapes: what it must hold, no more and no less.
        where: whose weights they are, for messages.

    Raises:
        UserError: a file that is damaged or ends before what its header claims, other tensors, or
            numbers that are not finite in float32.
    """
    try:
        with safe_open(path, "pt") as file:  # which compares the header with the file's size
            names = set(file.keys())
            for name, shape in shapes.items():
                kind, found = "", "nothing"
                if name in names:
                    claimed = file.get_slice(name)
                    kind, found = claimed.get_dtype(), str(tuple(claimed.get_shape()))
                if found != str(tuple(shape)):
                    raise UserError(f"{where}: {name} must be {tuple(shape)}, found {found}")
                if kind not in FLOATS:
                    raise UserError(f"{where}: {name} must be of {', '.join(FLOATS)}, found {kind}")
            if unknown := sorted(names - shapes.keys()):
                raise UserError(f"{where}: unknown weights {unknown[0]!r:.80}")
            weights = {name: file.get_tensor(name).float() for name in shapes}
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read the weights of {where}: {error}") from None
    check_finite(weights.items(), where)
    return weights


def check_header(path: Path) -> int:
    """How many numbers a file has, by its header, which is compared with the file's size.

    Raises:
        UserError: a file that is damaged, or weights of another type than floats.
    """
    num = 0
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                claimed = file.get_slice(name)
                if name.endswith(".weight") and claimed.get_dtype() not in FLOATS:
                    kinds = ", ".join(FLOATS)
                    raise UserError(f"{name} must be of {kinds}, found {claimed.get_dtype()}")
                num += math.prod(claimed.get_shape())
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path.name}: {error}") from None
    return num


def check_finite(weights: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Raise UserError for the first of these weights that is not finite."""
    for name, x in weights:
        if not torch.isfinite(x).all():
            raise UserError(f"{where}: {name} is not finite")
