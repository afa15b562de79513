"""Waiting for a device. It works beside the program: a clock that is read before it has finished
has measured only how long it took to ask.
"""

import torch


def wait_for(device: torch.device) -> None:
    """Wait until a device (cuda, mps, xpu, ...) has done all that it was asked; the CPU has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
