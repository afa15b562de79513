"""Prompts to stream from: one specification string for a list of conversations.

| spec | conversations |
|---|---|
| `own` | four of our own, two turns each; offline |
| `mt-bench` | MT-Bench (Zheng et al. 2023) from the hub: 80 of two turns |
| `PATH.jsonl` | a file of objects, one a line, with `turns` (as FastChat's) or `prompt` |

A conversation is the list of what its user says. Each first turn of `own` breaks off in mid-text,
for a model that continues texts instead of answering.
"""

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvalign import hub
from kvalign.errors import NotFoundError, UserError

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
    if spec == "mt-bench":
        rows = _hub_rows(MT_BENCH)
    elif spec.endswith(".jsonl"):
        rows = _file_rows(Path(spec).expanduser())
    else:
        near = difflib.get_close_matches(spec, NAMES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"unknown prompts {spec!r}{hint} (known: {', '.join(NAMES)})")
    found = [_turns(row, where) for where, row in rows]
    if not found:
        raise UserError(f"no prompt in {spec}: at least one is needed")
    return found


def _hub_rows(name: str) -> Iterator[tuple[str, Any]]:
    """The rows of a hub data set, or of a local folder of its name, each with where it is."""
    import datasets

    offline = f"prompts that work offline: {', '.join(OFFLINE)}"
    if not Path(name).is_dir() and not hub.is_reachable():
        raise UserError(f"no folder {name!r} here and the hub cannot be reached; {offline}")
    try:
        rows = list(datasets.load_dataset(name, split="train", streaming=True))
    except (OSError, ValueError) as error:  # no such data set or split; no connection
        raise UserError(f"cannot load 'train' of {name!r}: {error}; {offline}") from error
    yield from ((f"{name} row {number}", row) for number, row in enumerate(rows))


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


def _turns(row: Any, where: str) -> list[str]:
    turns: Any = None
    if isinstance(row, dict):
        turns = row.get("turns", row.get("prompt"))
        if isinstance(turns, str) and "turns" not in row:
            turns = [turns]
    if not isinstance(turns, list) or not turns or not all(map(_is_text, turns)):
        raise UserError(
            f'{where} needs "turns" (a list of texts) or "prompt" (a text or a list of them), '
            f"none empty, got {row!r:.80}"
        )
    return turns


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
