"""How much memory is free, and whether what is about to be allocated can fit at all."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvalign.foundation.errors import UserError

_BOUNDS = {  # of what spells a size in configs; beyond them no model is built even without memory
    ("layer", "depth", "block_count"): 2**10,
    ("head", "size", "dim", "embd", "inner", "position", "len", "window"): 2**31,
}
_MEMINFO = Path("/proc/meminfo")


def free_bytes() -> int | None:
    """Bytes of memory that are free; None where the system does not tell."""
    try:
        if _MEMINFO.exists():
            lines = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
            return 1024 * int(lines["MemAvailable"].split()[0])
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, KeyError, OSError, ValueError):
        return None


def check_room(num_bytes: int, what: str) -> None:
    """Raise UserError unless so many bytes are free here; the message begins with `what`."""
    free = free_bytes()
    if free is not None and num_bytes > free:
        raise UserError(f"{what} take {size(num_bytes)} of memory, and {size(free)} are free here")


def check_sizes(values: Mapping[str, Any], where: object) -> None:
    """Raise UserError, beginning with `where`, for a size beyond any in the config of a model, by
    whatever name an architecture has for it.
    """
    for name, value in values.items():
        for words, most in _BOUNDS.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and any(word in name for word in words) and not abs(value) <= most:
                raise UserError(f"{where}: {name} must be at most {most}, got {value:g}")


def size(num_bytes: float) -> str:
    """Bytes in words: `1.5 GB`."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} EB"
