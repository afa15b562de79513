"""Free memory and disk space, and whether what is planned can fit."""

import ctypes
import os
import shutil
from contextlib import suppress
from pathlib import Path

from kvalign.foundation.errors import UserError

_MEMINFO = Path("/proc/meminfo")


def free_bytes() -> int | None:
    """Free bytes of memory; None if the system does not report them."""
    try:
        if _MEMINFO.exists():
            lines = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
            return 1024 * int(lines["MemAvailable"].split()[0])
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, KeyError, OSError, ValueError):
        return None


def give_back() -> None:
    """Return freed memory to the system. glibc keeps memory between blocks in use; without glibc
    nothing is done.
    """
    with suppress(AttributeError, OSError, TypeError):  # TypeError: of Windows
        ctypes.CDLL(None).malloc_trim(0)


def check_room(num_bytes: int, what: str) -> None:
    """Raise UserError unless so many bytes are free; the message begins with `what`."""
    free = free_bytes()
    if free is not None and num_bytes > free:
        raise UserError(f"{what} need {size(num_bytes)} of memory, but only {size(free)} are free")


def check_disk(num_bytes: int, folder: Path, what: str) -> None:
    """Raise UserError unless a folder, which need not exist yet, has so much room; the message
    begins with `what`.
    """
    there = next(x for x in (folder.absolute(), *folder.absolute().parents) if x.exists())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise UserError(f"{what} needs {size(num_bytes)} in {folder}, which has {size(free)} left")


def size(num_bytes: float) -> str:
    """Bytes in words: `1.5 GB`."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} EB"
