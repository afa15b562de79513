"""Marks in a stream of text at two limits: the cache is full, the context length is passed."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvalign.streaming.text_stream import TextStream

MOST = 1024
"""Longest context length that a stream without a length passes; longer ones take minutes."""
BEYOND = 88
"""Number of tokens that it writes past that."""


def tokens_past(context_len: int | None, num_before: int) -> int | None:
    """Return how many tokens lead past the context length; None if there is none, or it is long."""
    if context_len is None or context_len > MOST:
        return None
    return max(context_len - num_before, 0) + BEYOND


def marked(pieces: Iterable[str], stream: TextStream) -> Iterator[str]:
    """The pieces of a stream. A line on stderr marks the first piece after an eviction, and the
    first past the context length.
    """
    context_len = stream.method.spec.context_len or math.inf
    size = stream.method.sizes.cache_size
    is_full = is_past = False
    for number, piece in enumerate(pieces):
        lines = []
        if not is_full and (is_full := stream.num_evicted > 0):
            lines.append(
                f"the cache of {size} entries is full, from here on the oldest are evicted"
            )
        if not is_past and (is_past := stream.num_fed > context_len):
            lines.append(
                f"the context length of {context_len} tokens ends here, the stream continues"
            )
        for line in lines if number else ():  # else the prompt passed it: `warn_if_too_long`
            _say(f"[token {stream.num_fed}: {line}]")
        yield piece


def _say(line: str) -> None:
    """Print a separate line, also if the text is on the same terminal."""
    start = "\n" if sys.stdout.isatty() and sys.stderr.isatty() else ""
    print(start + line, file=sys.stderr, flush=True)
