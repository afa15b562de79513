"""Weights of a safetensors file from outside: names, shapes and types fit, and all is finite."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvalign.foundation.errors import UserError

FLOATS = ("F64", "F32", "F16", "BF16")
_USUAL = (torch.float32, torch.float16, torch.bfloat16)


def read_weights(
    path: Path, shapes: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, Tensor]:
    """The tensors of a file, in float32; UserError: others, or not finite.

    Args:
        shapes: of exactly the tensors that it must contain.
        where: owner of the weights, for messages.
    """
    with opened(path, f"the weights of {where}") as file:
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


@contextmanager
def opened(path: Path, what: str) -> Iterator[Any]:
    """Safetensors file whose header was compared with its size; UserError if it is invalid."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise OSError("it is not a file")
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {what}: {error}") from None


def check_header(path: Path, *, any_type: bool = False) -> int:
    """Return how many numbers a file has according to its header, which is compared with the file's
    size; UserError: damaged, or of another type.

    Args:
        any_type: allow any type, for quantised weights.
    """
    num = 0
    with opened(path, path.name) as file:
        for name in file.keys():  # noqa: SIM118
            claimed = file.get_slice(name)
            is_float = any_type or claimed.get_dtype() in FLOATS
            if name.endswith(".weight") and not is_float:
                kinds = ", ".join(FLOATS)
                raise UserError(f"{name} must be of {kinds}, found {claimed.get_dtype()}")
            num += math.prod(claimed.get_shape())
    return num


def check_finite(weights: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Raise UserError for the first non-finite weight."""
    for name, x in weights:
        # The extremes are not finite if any number is not, and are found faster than those.
        extremes = x.detach().aminmax() if x.numel() and x.dtype in _USUAL else (x,)
        if not all(torch.isfinite(one).all() for one in extremes):
            raise UserError(f"{where}: {name} is not finite")
