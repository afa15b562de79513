"""Files of saved streams and pieces: their checksum, and opening one."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvalign.foundation.errors import NotFoundError, UserError


def checksum(about: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 of what a file says of its tensors, and of these with their names and shapes."""
    digest = hashlib.sha256(about.encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {list(x.shape)} ".encode())
        digest.update(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def open_saved(path: Path, what: str) -> Iterator[Any]:
    """Context with an open safetensors file that should have a stream or a piece.

    Raises:
        NotFoundError: no such file.
        UserError: it is no safetensors file.
    """
    wrong = f"{path} is not a {what} that kvalign saved"
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise UserError(wrong)
        with safe_open(path, "pt") as file:
            yield file
    except FileNotFoundError:
        raise NotFoundError(f"no saved {what} {path}") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{wrong}: {error}") from None
