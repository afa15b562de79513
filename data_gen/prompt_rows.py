"""Conversations in the rows of a file or a data set: the `turns` or `prompt` of each."""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from kvalign.data_gen.hub_dataset import rows_of
from kvalign.foundation.errors import NotFoundError, UserError
from kvalign.foundation.files import checked


class _Row(BaseModel):
    """A row of prompts; its other fields are left aside."""

    turns: Annotated[list[Annotated[str, Field(strict=True, pattern=r"\S")]], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _prompt_is_turns(cls, row: Any) -> Any:
        if isinstance(row, dict) and "turns" not in row and "prompt" in row:
            prompt = row["prompt"]
            return {"turns": [prompt] if isinstance(prompt, str) else prompt}
        return row


def of_hub(name: str, offline: str) -> list[list[str]]:
    """Turns of each row of a hub data set; `offline` ends the message without a hub."""
    rows = rows_of(name, None, "train", offline)
    return [_turns(row, f"{name} row {number}") for number, row in enumerate(rows)]


def of_file(path: Path) -> list[list[str]]:
    """Turns of each line of a JSON Lines file; blank lines are left out."""
    if not path.is_file():
        raise NotFoundError(f"no prompts at {str(path)!r}: name a .jsonl file")
    # As bytes: JSON may hold characters that end a line for str.splitlines.
    lines = enumerate(path.read_bytes().splitlines(), 1)
    return [_turns(_row(line, where := f"{path}:{n}"), where) for n, line in lines if line.strip()]


def _row(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # not JSON or UTF-8, or nested too deep
        raise UserError(f"{where} must be JSON: {getattr(error, 'msg', error)}") from error


def _turns(row: Any, where: str) -> list[str]:
    needed = '"turns" (a list of texts) or "prompt" (a text or a list of them)'
    return checked(_Row, row, f"{where} needs {needed}").turns
