"""This machine and its devices: which one `auto` is, what memory and disk space is free, whether
what is planned can fit. A device works beside the program: a clock that is read before it has
finished has measured only how long it took to ask. And many processes, on this machine or on a
cluster that shares the folders, with Ray.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, KeyError, OSError, ValueError):
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


ANSWER_S = 5.0

# Read by Ray when it is imported: what it would send home, and a coming change it would warn of.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@contextmanager
def ray_session(address: str | None = None) -> Iterator[Any]:
    """The `ray` module, quiet, on the cluster at an address (else at RAY_ADDRESS, which Ray reads)
    or started on this machine, and shut down at the end. UserError if no cluster is at the address.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    if address is not None:
        _check_answers(address)
    try:
        ray.init(
            address=address,
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        if address is None:
            raise
        raise UserError(f"no Ray cluster at {address!r}: {error}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise UserError if nothing answers at a cluster's address; Ray would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return  # `auto`, or a name that Ray knows
    if not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise UserError(f"no Ray cluster at {address!r}: it takes HOST:PORT, or auto")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except (OSError, UnicodeError) as error:
        raise UserError(f"no Ray cluster at {address!r}: {error}") from error
