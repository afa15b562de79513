"""Prompts for streams: one specification string for a list of conversations.

| spec | conversations |
|---|---|
| `own` | four of our own, two turns each; offline |
| `talk` | one of our own, thirty turns; offline |
| `mt-bench` | MT-Bench (Zheng et al. 2023) from the hub: 80 of two turns |
| `PATH.jsonl` | a file of objects, one a line, with `turns` (as FastChat's) or `prompt` |

A conversation is the list of its user turns. Each first turn of `own` breaks off in the middle of a
text, for models that continue texts instead of answering.
"""

from pathlib import Path

from kvalign.foundation.errors import UserError
from kvalign.foundation.registry import unknown
from kvalign.foundation.settings import typed

MT_BENCH = "HuggingFaceH4/mt_bench_prompts"
NAMES = ("own", "talk", "mt-bench", "PATH.jsonl")

OURS = {name: Path(__file__).with_name(f"{name}_prompts.jsonl") for name in ("own", "talk")}


def conversations(spec: str) -> list[list[str]]:
    """Conversations of a specification (see the table above), each with one user turn or more.

    Raises:
        UserError: unknown prompts, a hub that cannot be reached (the message names prompts that
            work offline), or a row without a turn (the message names its line).
        NotFoundError: no such file.
    """
    from kvalign.data_gen import prompt_rows  # pydantic: not needed for the names

    spec = typed("prompts", spec, str)
    if spec == "mt-bench":
        turns = prompt_rows.of_hub(MT_BENCH, "prompts that work offline: own, talk, PATH.jsonl")
    elif spec in OURS or spec.endswith(".jsonl"):
        turns = prompt_rows.of_file(OURS.get(spec) or Path(spec).expanduser())
    else:
        raise UserError(unknown("prompts", spec, NAMES))
    if not turns:
        raise UserError(f"no prompt in {spec}: at least one is needed")
    return turns
