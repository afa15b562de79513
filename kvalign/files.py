"""Files that are there whole or not at all: written to a temporary name beside their place, then
renamed. And folders that one run writes at a time.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

LOCK = ".lock"


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file, then give it its name; an interrupted write leaves nothing
    behind.

    Raises:
        OSError: it could not be written (disk full, no permission), whatever `write` made of that.
    """
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        write(partial)
        os.replace(partial, path)
    except (SafetensorError, RuntimeError) as error:  # safetensors' and torch.save's own
        raise OSError(f"cannot write {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text whole."""
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A folder, made if need be, that no other run writes to; the lock of a killed run is free.

    Raises:
        ValueError: another run writes to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"another run is writing to {folder}: wait for it, or name another --out"
        ) from None
    try:
        yield
    finally:
        lock.release()
