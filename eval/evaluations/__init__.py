"""Evaluations, one line each. `NAME.py` beside this file has the `EVALUATION` of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvalign.foundation.names import Registry

if TYPE_CHECKING:
    from kvalign.eval.protocol import Evaluation

ABOUT = {
    "perplexity": "compare methods on perplexity and time",
    "latency": "measure time per token of all methods, taking turns",
    "frontier": "set perplexity against the time of a token: which method is worth its time",
    "readability": "let methods write, and judge their texts",
    "streameval": "ask for values that were registered some lines back in an endless stream",
    "recall": "ask for facts at growing distances: how much of its cache a method can read",
    "needle": "ask for codes hidden in a real text, up to 64 cache sizes back",
    "told": "ask for facts from early turns of a conversation, after other talk",
    "edit": "cut, replace and insert tokens of a stream, and compare with encoding anew",
    "attention": "show where attention goes, before and after the sinks are evicted",
}
EVALUATIONS: Registry[Evaluation] = Registry(
    "evaluation", {name: f"{__name__}.{name}:EVALUATION" for name in ABOUT}
)
