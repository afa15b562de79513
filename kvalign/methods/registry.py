"""Names of the streaming methods, with one line here each. The command line, reports and tests
read this registry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvalign.foundation.errors import UserError
from kvalign.foundation.names import Registry, unknown

if TYPE_CHECKING:
    from kvalign.methods.base import Method

METHODS: Registry[type[Method]] = Registry(
    "method",
    {
        "dense": "kvalign.methods.as_encoded:Dense",
        "window": "kvalign.methods.cached:Window",
        "streaming-llm": "kvalign.methods.cached:StreamingLLM",
        "recompute": "kvalign.methods.as_encoded:Recompute",
        "discard-half": "kvalign.methods.as_encoded:DiscardHalf",
        "kvalign": "kvalign.methods.cached:KVAlign",
    },
)
"""Method classes by their names on the command line."""

AUTO = "auto"
"""Default in place of a name: the method that fits the model."""
AUTO_ABOUT = (
    "the default: kvalign if an aligner is available; otherwise streaming-llm on rotary and "
    "ALiBi positions, discard-half on learned ones"
)


def check_name(name: str) -> None:
    """Raise UserError unless it is the name of a method, or `auto`."""
    if not isinstance(name, str):
        raise UserError(f"method must be one of {', '.join([AUTO, *METHODS])}, got {name!r:.80}")
    if name != AUTO and name not in METHODS:
        raise UserError(unknown("method", name, [AUTO, *METHODS]))
