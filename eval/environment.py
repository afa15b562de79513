"""Where a figure was measured: versions, commit, machine. Every result file carries it."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch


def environment(device: str = "cpu") -> dict[str, str | int]:
    """Versions of what computes, the commit (if run from a checkout), the processor or GPU and its
    threads.
    """
    name = _processor() if device == "cpu" else device
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
    return {
        "kvalign": version("kvalign"),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "commit": _commit(),
        "device": name,
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _commit() -> str:
    """The checkout's commit, or "" for an installed package."""
    folder = Path(__file__).parent
    if not (folder.parent / ".git").exists():
        return ""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
