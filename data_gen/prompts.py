"""Prompts to stream from: one specification string for a list of conversations.

| spec | conversations |
|---|---|
| `own` | four of our own, two turns each; offline |
| `mt-bench` | MT-Bench (Zheng et al. 2023) from the hub: 80 of two turns |
| `PATH.jsonl` | a file of objects, one a line, with `turns` (as FastChat's) or `prompt` |

A conversation is the list of what its user says. Each first turn of `own` breaks off in mid-text,
for a model that continues texts instead of answering.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from kvalign.data_gen.hub_dataset import rows_of
from kvalign.errors import NotFoundError, UserError
from kvalign.files import checked
from kvalign.registry import unknown

MT_BENCH = "HuggingFaceH4/mt_bench_prompts"
NAMES = ("own", "mt-bench", "PATH.jsonl")
OFFLINE = ("own", "PATH.jsonl")

OWN = (
    (
        "The island was first settled by fishermen from the mainland, who built a small harbour on "
        "its northern shore. The history of the island",
        "How do the people of the island live today?",
    ),
    (
        "Bread is baked from flour, water, salt and yeast. The dough is kneaded until it is smooth "
        "and left in a warm place. After an hour",
        "Why does the dough have to rest before it is baked?",
    ),
    (
        "The river rises in the hills near the border and flows through three towns before it "
        "reaches the sea. In the spring, when the snow melts,",
        "Which animals live along its lower course?",
    ),
    (
        "The first railway in the valley was opened to carry stone from the quarry to the port. "
        "Within ten years the line",
        "What became of the line when the quarry was closed?",
    ),
)


_NEEDED = '"turns" (a list of texts) or "prompt" (a text or a list of them)'


class _Row(BaseModel):
    """A row of a file or a data set; what else it has is left aside."""

    turns: Annotated[list[Annotated[str, Field(strict=True, pattern=r"\S")]], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _prompt_is_turns(cls, row: Any) -> Any:
        if isinstance(row, dict) and "turns" not in row and "prompt" in row:
            prompt = row["prompt"]
            return {"turns": [prompt] if isinstance(prompt, str) else prompt}
        return row


def conversations(spec: str) -> list[list[str]]:
    """The conversations of a specification, each one user turn or more, none empty.

    Args:
        spec: see the table above.

    Raises:
        UserError: unknown prompts, a hub that cannot be reached (the message names what works
            offline), or a row without a turn (the message names its line).
        NotFoundError: there is no such file.
    """
    if spec == "own":
        return [list(turns) for turns in OWN]
    rows: Iterator[tuple[str, Any]]
    if spec == "mt-bench":
        offline = f"prompts that work offline: {', '.join(OFFLINE)}"
        hub_rows = rows_of(MT_BENCH, None, "train", offline)
        rows = ((f"{MT_BENCH} row {number}", row) for number, row in enumerate(hub_rows))
    elif spec.endswith(".jsonl"):
        rows = _file_rows(Path(spec).expanduser())
    else:
        raise UserError(unknown("prompts", spec, NAMES))
    turns = [checked(_Row, row, f"{where} needs {_NEEDED}").turns for where, row in rows]
    if not turns:
        raise UserError(f"no prompt in {spec}: at least one is needed")
    return turns


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file, each with its line; blank lines are left out."""
    if not path.is_file():
        raise NotFoundError(f"no prompts at {str(path)!r}: name a .jsonl file")
    # As bytes: JSON may hold characters that end a line for str.splitlines.
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # not JSON or UTF-8, or nested too deep
            reason = getattr(error, "msg", error)
            raise UserError(f"{where} must be a JSON object: {reason}") from error
        yield where, row
