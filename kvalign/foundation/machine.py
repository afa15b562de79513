"""This machine and its devices: which one `auto` is, what memory and disk space is free, whether
what is planned can fit. A device works beside the program: a clock that is read before it has
finished has measured only how long it took to ask.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvalign.foundation.errors import UserError

if TYPE_CHECKING:
    import torch

AUTO = "auto"
_MEMINFO = Path("/proc/meminfo")


def free_bytes(device: torch.device | None = None) -> int | None:
    """Free bytes of memory, or of a device with its own; None where the system does not say."""
    if device is not None and is_on_card(device):
        import torch

        return torch.cuda.mem_get_info(device)[0]
    try:
        if _MEMINFO.exists():
            lines = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
            return 1024 * int(lines["MemAvailable"].split()[0])
    except (KeyError, OSError, ValueError):
        return None
    return total_bytes()


def total_bytes() -> int | None:
    """Bytes of this machine's memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def give_back() -> None:
    """Return freed memory to the system, which glibc keeps between blocks in use."""
    with suppress(AttributeError, OSError, TypeError):  # TypeError: of Windows
        ctypes.CDLL(None).malloc_trim(0)


def check_room(num_bytes: int, what: str) -> None:
    """Raise UserError unless so many bytes are free; the message begins with `what`."""
    free = free_bytes()
    if free is not None and num_bytes > free:
        from rich.filesize import decimal

        room = f"{decimal(num_bytes)} of memory, but only {decimal(free)} are free"
        raise UserError(f"{what} need {room}")


def check_disk(num_bytes: int, folder: Path, what: str) -> None:
    """Raise UserError, beginning with `what`, unless a folder, new or not, has so much room."""
    there = next(x for x in (folder.absolute(), *folder.absolute().parents) if x.exists())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        from rich.filesize import decimal

        room = f"{decimal(num_bytes)} in {folder}, which has {decimal(free)} left"
        raise UserError(f"{what} needs {room}")


def resolved(device: str) -> str:
    """Name of a device; `auto` is cuda if torch sees one, else the cpu."""
    import torch

    if device != AUTO:
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def is_on_card(device: torch.device) -> bool:
    """Return whether a device has memory of its own, and says how much of it is free."""
    return device.type == "cuda"


def has_room(device: str | torch.device, num_bytes: int) -> bool:
    """Return whether a device has so many bytes free; only CUDA's say so."""
    import torch

    device = torch.device(device)
    return not is_on_card(device) or num_bytes <= torch.cuda.mem_get_info(device)[0]


def wait_for(device: torch.device) -> None:
    """Wait until a device (cuda, mps, xpu, ...) has done all that it was asked; the CPU has."""
    if device.type != "cpu":
        import torch

        torch.accelerator.synchronize(device)
