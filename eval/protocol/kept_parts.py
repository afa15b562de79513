"""Parts of a long evaluation that are kept as they end, so that a run that was interrupted does not
begin anew: a JSON file each, named by everything that its rows depend on.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvalign.eval.protocol.evaluation import Row
from kvalign.foundation.files import read_json, write_json


def kept(folder: Path | None, key: dict[str, Any], measure: Callable[[], list[Row]]) -> list[Row]:
    """The rows of a part: those in the folder, or measured and written there; without a folder they
    are measured.

    Raises:
        UserError: the part's file is damaged.
    """
    if folder is None:
        return measure()
    text = json.dumps(key, default=str, sort_keys=True)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if path.exists():
        return read_json(path)["rows"]
    rows = measure()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, {"key": json.loads(text), "rows": rows})
    return rows


def summary_of(folder: Path | None) -> str:
    """Return what a folder keeps of an interrupted run."""
    num_parts = len(list(folder.glob("[!.]*.json"))) if folder else 0
    return f"{num_parts} finished parts are kept in {folder}" if num_parts else ""
