"""Folder of an aligner of any kind: not overwritten unless asked, with a record of its training,
complete or absent.
"""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvalign.aligners import Aligner, AlignerConfig
from kvalign.aligners.base import CONFIG
from kvalign.foundation.errors import ExistsError
from kvalign.foundation.files import write_together
from kvalign.foundation.machine import check_room
from kvalign.foundation.settings import Settings, check_output
from kvalign.memory.plan import FILE as PLAN

OVERWRITE = "give --overwrite or another --out"
IDENTITY = "identity"
"""Entry of the data in a record: the identity of the model."""

BYTES_A_WEIGHT = 16  # in training: itself, its gradient and two moments, in float32

A = TypeVar("A", bound=Aligner)


def new_aligner(kind: type[A], config: AlignerConfig) -> A:
    """Untrained aligner; UserError if there is not enough memory to train one of these sizes."""
    with torch.device("meta"):
        num_weights = sum(x.numel() for x in kind(config).state_dict().values())
    check_room(BYTES_A_WEIGHT * num_weights, f"the weights of a {config.kind} of these sizes")
    return kind(config)


def check_free(out: Path, overwrite: bool) -> None:
    """Raise ExistsError if `out` has an aligner that must not be overwritten, UserError if it
    cannot be written.
    """
    check_output(out, "folder")
    if (out / CONFIG).exists() and not overwrite:
        raise ExistsError(f"{out} already holds an aligner: {OVERWRITE}")


def record_of(
    command: str,
    settings: Settings,
    data: dict[str, Any],
    device: torch.device | None = None,
    packages: tuple[str, ...] = ("kvalign", "torch"),
) -> dict[str, Any]:
    """Return the record of an aligner's part for its config and card: how it was trained.

    Args:
        command, settings: of this command line, which trains it again.
        data: its training data.
        device: its training device; None if it was not trained here.
        packages: those whose versions are recorded.
    """
    words = settings.command_line(command, leave_out=("overwrite",))
    record: dict[str, Any] = {"command": words, "data": data}
    if device is not None:
        on_gpu = device.type == "cuda"
        record["device"] = torch.cuda.get_device_name(device) if on_gpu else platform.machine()
        record["num_threads"] = torch.get_num_threads()
    return record | {"versions": {name: version(name) for name in packages}}


def save(aligner: Aligner, out: Path) -> None:
    """Write the aligner's files and its card; the config is last and marks them as complete."""

    def write(folder: Path) -> None:
        aligner.eval().requires_grad_(False).save_pretrained(folder)
        (out / PLAN).unlink(missing_ok=True)  # it is of another aligner

    write_together(out, write, last=CONFIG)
