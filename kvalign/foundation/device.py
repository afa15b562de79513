"""Devices: which one `auto` is, and waiting for one. It works beside the program: a clock that is
read before it has finished has measured only how long it took to ask.
"""

import torch

AUTO = "auto"
HOST = torch.device("cpu")


def resolved(device: str) -> str:
    """Name of a device; `auto` is cuda if torch sees one, else the cpu."""
    if device != AUTO:
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def is_on_card(device: torch.device) -> bool:
    """Return whether a device has memory of its own, and says how much of it is free."""
    return device.type == "cuda"


def has_room(device: str | torch.device, num_bytes: int) -> bool:
    """Return whether a device has so many bytes free; only CUDA's say so."""
    if not is_on_card(torch.device(device)):
        return True
    return num_bytes <= torch.cuda.mem_get_info(device)[0]


def wait_for(device: torch.device) -> None:
    """Wait until a device (cuda, mps, xpu, ...) has done all that it was asked; the CPU has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
