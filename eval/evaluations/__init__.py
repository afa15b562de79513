"""The evaluations: a line each. `NAME.py` beside this file has the `EVALUATION` of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvalign.foundation.registry import Registry

if TYPE_CHECKING:
    from kvalign.eval.protocol.evaluation import Evaluation

ABOUT = {
    "perplexity": "compare methods on perplexity and time",
    "latency": "time per token of all methods, taking turns",
    "readability": "let methods write, and judge what they wrote",
    "streameval": "ask for values registered some lines back in an endless stream",
    "recall": "ask for facts by their distance: how much of its cache a method can read",
    "attention": "what queries look at before and after an eviction of the sinks",
    "chat": "many conversations through one stream, each answer judged",
}
EVALUATIONS: Registry[Evaluation] = Registry(
    "evaluation", {name: f"{__name__}.{name}:EVALUATION" for name in ABOUT}
)
