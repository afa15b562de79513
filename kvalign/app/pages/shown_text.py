"""Text in readable form: the marks of WikiText's tokenised form are undone. This changes only the
display; evaluations judge the original text.

    " = Title = \\n a two @-@ part <unk> , 1 @,@ 000"  ->  "Title\\n a two-part […], 1,000"
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvalign.eval.judging.chunks import Chunk

UNKNOWN = "[…]"
"""Replacement for a corpus's `<unk>`."""
_MARKS = re.compile(r" ?@([-,.])@ ?")
_HEADING = re.compile(r"^ *(?:= ?){1,4}(?=[^=\s])|(?: ?=){1,4} *$", re.MULTILINE)
# Spaces that only a tokenised text has: before a closing mark or an ending, after an opening one,
# around the end of a line.
_SPACES = re.compile(
    r" (?=[,.;:!?)\]%](?=\s|$)|['\u2019](?:s|t|d|m|re|ve|ll)\b|n['\u2019]t\b)|(?<=[(\[$£]) "
    r"| +(?=\n)|(?<=\n) +"
)
_IS_TOKENISED = re.compile(r"\w [,.](?=\s|$)")


class Piece(NamedTuple):
    """Part of a text with one style."""

    text: str  # as a reader expects it
    kind: str  # `readable` or `unreadable`; `tail` after the last chunk


def pieces(text: str, chunks: Sequence[Chunk]) -> Iterator[Piece]:
    """Parts of a text, cut after its chunks; the last one is the rest."""
    is_tokenised, end = _IS_TOKENISED.search(text) is not None, 0
    marks = [mark.span() for mark in _MARKS.finditer(text)]
    for chunk in chunks:
        stop = next((last for first, last in marks if first < chunk.end < last), chunk.end)
        kind = "readable" if chunk.is_readable else "unreadable"
        yield Piece(readable(text[end:stop], is_tokenised), kind)
        end = stop
    yield Piece(readable(text[end:], is_tokenised), "tail")


def readable(text: str, is_tokenised: bool) -> str:
    """Part of a text without marks."""
    text = _MARKS.sub(r"\1", text).replace("<unk>", UNKNOWN)
    return _SPACES.sub("", _HEADING.sub("", text)) if is_tokenised else text
