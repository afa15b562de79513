"""Prompts for streams: one specification string for a list of conversations.

| spec | conversations |
|---|---|
| `own` | four of our own, two turns each; offline |
| `mt-bench` | MT-Bench (Zheng et al. 2023) from the hub: 80 of two turns |
| `PATH.jsonl` | a file of objects, one a line, with `turns` (as FastChat's) or `prompt` |

A conversation is the list of its user turns. Each first turn of `own` breaks off in the middle of a
text, for models that continue texts instead of answering.
"""

from pathlib import Path
from typing import Any

from kvalign.data_gen.corpus import rows_of
from kvalign.foundation.errors import NotFoundError, UserError
from kvalign.foundation.files import parse_json, text_of
from kvalign.foundation.names import unknown
from kvalign.foundation.settings import typed

MT_BENCH = "HuggingFaceH4/mt_bench_prompts"
NAMES = ("own", "mt-bench", "PATH.jsonl")
OWN = Path(__file__).with_name("own_prompts.jsonl")


def conversations(spec: str) -> list[list[str]]:
    """Conversations of a specification (see the table above), each with one user turn or more.

    Raises:
        UserError: unknown prompts, a hub that cannot be reached (the message names prompts that
            work offline), or a row without a turn (the message names its line).
        NotFoundError: no such file.
    """
    spec = typed("prompts", spec, str)
    if spec == "mt-bench":
        offline = "prompts that work offline: own, PATH.jsonl"
        rows = enumerate(rows_of(MT_BENCH, None, "train", offline))
        turns = [_turns(row, f"{MT_BENCH} row {number}") for number, row in rows]
    elif spec == "own" or spec.endswith(".jsonl"):
        path = OWN if spec == "own" else Path(spec).expanduser()
        if not path.is_file():
            raise NotFoundError(f"no prompts at {str(path)!r}: name a .jsonl file")
        # As bytes: JSON may hold characters that end a line for str.splitlines.
        lines = [(f"{path}:{n}", x) for n, x in enumerate(path.read_bytes().splitlines(), 1)]
        turns = [
            _turns(parse_json(text_of(line, where), where), where)
            for where, line in lines
            if line.strip()
        ]
    else:
        raise UserError(unknown("prompts", spec, NAMES))
    if not turns:
        raise UserError(f"no prompt in {spec}: at least one is needed")
    return turns


def _turns(row: Any, where: str) -> list[str]:
    """The turns of a row, whose other fields are left aside."""
    found = row.get("turns", row.get("prompt")) if isinstance(row, dict) else None
    turns = [found] if isinstance(found, str) and "turns" not in row else found
    are_texts = isinstance(turns, list) and all(isinstance(x, str) and x.strip() for x in turns)
    if not (are_texts and turns):
        needed = '"turns" (a list of texts) or "prompt" (a text or a list of them)'
        raise UserError(f"{where} needs {needed}, got {found!r:.80}")
    return turns
