"""Files that appear whole or not at all, and reading them back with errors of one line."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a file under another name, then rename it."""
    partial = path.with_name(path.name + ".partial")
    write(partial)
    os.replace(partial, path)


def write_json(path: Path, values: dict[str, Any]) -> None:
    text = json.dumps(values, indent=1) + "\n"
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> dict[str, Any]:
    """Raises ValueError naming the file when it does not hold a JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold an object, found {type(values).__name__}")
    return values


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
