"""Files that are kept in the user's cache folder and read again, to save the time of making them:
packed weights, kernels, compiled steps. One rule holds for all.

    NAME.EXT     NAME has a digest of all that it was made of: other files have other names
    NAME.json    a checksum of it

A file is read only if its checksum holds. Else it is made again, and a line says so.
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from kvalign.foundation.errors import UserError
from kvalign.foundation.files import read_json, write_json, write_together
from kvalign.foundation.progress import warn_once

_AT_ONCE = 2**20  # bytes, which stay in the processor's cache


def checksum(path: Path) -> str:
    """CRC-32 of a file (4 GB/s) and its length."""
    crc, size, buffer = 0, 0, memoryview(bytearray(_AT_ONCE))
    with path.open("rb", buffering=0) as file:
        while num := file.readinto(buffer):
            crc, size = zlib.crc32(buffer[:num], crc), size + num
    return f"{crc:08x}-{size}"


def is_whole(file: Path) -> bool:
    """Return whether a kept file is there as it was written."""
    try:
        if not file.exists():
            return False
        if read_json(_about(file))["checksum"] == checksum(file):
            return True
    except (UserError, KeyError, OSError):
        pass
    warn_once(f"{file} is damaged: it is made again, not read")
    return False


def keep(file: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file under a temporary name, then keep it; OSError where it cannot."""

    def write_both(partial: Path) -> None:
        write(partial / file.name)
        write_json(partial / _about(file).name, {"checksum": checksum(partial / file.name)})

    write_together(file.parent, write_both, _about(file).name)


@contextmanager
def being_made(file: Path) -> Iterator[None]:
    """Context in which no other process makes this file; OSError where it cannot be kept."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(_lock(file)):
        yield


def forget(file: Path) -> None:
    for path in (_about(file), file, _lock(file)):
        path.unlink(missing_ok=True)


def _about(file: Path) -> Path:
    return file.with_suffix(".json")


def _lock(file: Path) -> Path:
    return file.with_name(f".{file.stem}.lock")
