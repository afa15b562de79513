"""Saved streams that were changed after they were written."""

import json
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvalign.streaming import stream_file


def change_stream(path: Path, change: Callable[[dict, dict], object], in_one: bool = False) -> None:
    """Change the tensors of a file and what it says, as in one without a checksum: with it nothing
    else would be looked at. `in_one` brings those of its memory into it before.
    """
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors, about = load_file(path), json.loads(metadata["stream"])
    if in_one:
        tensors, about["memory_file"] = stream_file.read(path)[1], None
    change(tensors, about)
    del metadata["sha256"]
    save_file(tensors, path, {**metadata, "stream": json.dumps(about)})
