"""Prompts to stream from: one specification string for a list of conversations.

| spec | conversations |
|---|---|
| `own` | four of our own, two turns each; offline |
| `mt-bench` | MT-Bench (Zheng et al. 2023) from the hub: 80 of two turns |
| `PATH.jsonl` | a file of objects, one a line, with `turns` (as FastChat's) or `prompt` |

A conversation is the list of what its user says. Each first turn of `own` breaks off in mid-text,
for a model that continues texts instead of answering.
"""

from pathlib import Path

from kvalign.errors import UserError
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


def conversations(spec: str) -> list[list[str]]:
    """The conversations of a specification, each one user turn or more, none empty.

    Args:
        spec: see the table above.

    Raises:
        UserError: unknown prompts, a hub that cannot be reached (the message names what works
            offline), or a row without a turn (the message names its line).
        NotFoundError: no such file.
    """
    if spec == "own":
        return [list(turns) for turns in OWN]
    from kvalign.data_gen import prompt_rows  # pydantic: not needed for the names

    if spec == "mt-bench":
        turns = prompt_rows.of_hub(MT_BENCH, f"prompts that work offline: {', '.join(OFFLINE)}")
    elif spec.endswith(".jsonl"):
        turns = prompt_rows.of_file(Path(spec).expanduser())
    else:
        raise UserError(unknown("prompts", spec, NAMES))
    if not turns:
        raise UserError(f"no prompt in {spec}: at least one is needed")
    return turns
