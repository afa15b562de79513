"""The folders that are taken where none is named, below the one in which a command runs.

    kvalign-data/MODEL/caches   what `kvalign gen-data` records of a model
    kvalign-data/MODEL/KIND     its aligner of a kind, from `kvalign train`

MODEL is the last part of the model's name: `distilgpt2` of `distilbert/distilgpt2`, `my-model` of
`files/my-model.gguf`.
"""

import os
from pathlib import Path

ROOT = Path("kvalign-data")
RECORDING = "caches"


def folder_of(model: str) -> Path:
    """The folder of what is made for a model, given its name or its own folder."""
    return ROOT / os.path.basename(os.path.abspath(model)).removesuffix(".gguf")


def newest_first(model: str, file_name: str) -> list[Path]:
    """The files of a name in the folders inside a model's folder, the one written last first."""
    found = folder_of(model).glob(f"*/{file_name}")
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
