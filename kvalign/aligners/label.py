"""Name of an aligner in tables of results, and a line on its use, without importing torch."""

from collections.abc import Mapping
from typing import Any


def label_of(kind: str, training: Mapping[str, Any]) -> str:
    """Name of an aligner in tables of results: its kind, and its objective unless `mse`.

    Args:
        kind, training: as in `AlignerConfig`.
    """
    parts = (part for part in training.values() if isinstance(part, dict))
    return "-".join(
        [kind, *sorted({str(part.get("objective", "mse")) for part in parts} - {"mse"})]
    )


def note_of_use(folder: object, model: str) -> str:
    """Line that says that an aligner was found where it was trained, for want of a shipped one."""
    return f"using {folder}, trained here: none ships for {model}"
