"""The folder of an aligner of any kind: not overwritten unasked, training on record, whole."""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvalign.aligners import Aligner, AlignerConfig
from kvalign.aligners.base import CONFIG
from kvalign.foundation.errors import ExistsError
from kvalign.foundation.files import write_together
from kvalign.foundation.memory import check_room
from kvalign.foundation.settings import Settings, check_output

OVERWRITE = "give --overwrite or another --out"


BYTES_A_WEIGHT = 16  # in training: itself, its gradient and two moments, in float32

A = TypeVar("A", bound=Aligner)


def new_aligner(kind: type[A], config: AlignerConfig) -> A:
    """An untrained aligner; UserError if there is no memory to train one of these sizes."""
    with torch.device("meta"):
        num_weights = sum(x.numel() for x in kind(config).state_dict().values())
    check_room(BYTES_A_WEIGHT * num_weights, f"the weights of a {config.kind} of these sizes")
    return kind(config)


def check_free(out: Path, overwrite: bool) -> None:
    """Raise ExistsError if `out` holds an aligner that is not to be overwritten, UserError if it
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
    """Return the record of an aligner's part for its config and card: how it came about.

    Args:
        command, settings: of this command line, which make it again.
        data: what it was trained on.
        device: what it was trained on; None for what was not trained here.
        packages: whose versions are recorded.
    """
    words = settings.command_line(command, leave_out=("resume", "overwrite"))
    record: dict[str, Any] = {"command": words, "data": data}
    if device is not None:
        on_gpu = device.type == "cuda"
        record["device"] = torch.cuda.get_device_name(device) if on_gpu else platform.machine()
        record["num_threads"] = torch.get_num_threads()
    return record | {"versions": {name: version(name) for name in packages}}


def save(aligner: Aligner, out: Path) -> None:
    """Write the aligner's files, its card among them; the config, the last, says they are there."""
    aligner.eval().requires_grad_(False)
    write_together(out, aligner.save_pretrained, last=CONFIG)
