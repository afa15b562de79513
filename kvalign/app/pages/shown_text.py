"""Text in readable form: the marks of WikiText's tokenised form are undone, and headings shown as
headings. This changes only the display; evaluations judge the original text.

    " = Title = \\n a two @-@ part <unk> , 1 @,@ 000"  ->  "Title\\n a two-part […], 1,000"
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvalign.eval.judging.chunks import Chunk

UNKNOWN = "[…]"
"""Replacement for a corpus's `<unk>`."""
_MARKS = re.compile(r" ?@(?P<joined>[-,.])@ ?|(?P<unknown><unk>)")
# Spaces that only a tokenised text has: before a closing mark or an ending, after an opening one,
# around the end of a line.
_SPACES = re.compile(
    r" (?=[,.;:!?)\]%](?=\s|$)|['\u2019](?:s|t|d|m|re|ve|ll)\b|n['\u2019]t\b)|(?<=[(\[$£]) "
    r"| +(?=\n)|(?<=\n) +"
)
_IS_TOKENISED = re.compile(r"\w [,.](?=\s|$)")
_HEADING = re.compile(
    r"^(?P<opening> *(?:= ?){1,4})(?=[^=\s])[^=\n]*?(?P<closing>(?: ?=){1,4} *)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Piece:
    """Part of a text with one style."""

    text: str  # as a reader expects it
    kind: str  # `readable` or `unreadable`; `tail` after the last chunk; empty between chunks
    is_heading: bool


def pieces(text: str, chunks: Sequence[Chunk]) -> Iterator[Piece]:
    """Parts of a text, cut at its chunks and headings; the last one is the rest."""
    headings = [(match.start(), match.end()) for match in _HEADING.finditer(text)]
    edits = _edits(text)
    for first, end, kind in _kinds(len(text), chunks):
        cuts = [first, *(cut for h in headings for cut in h if first < cut < end), end]
        for a, b in pairwise(cuts):
            part = _edit(text, a, b, edits)
            if part or kind == "tail":
                yield Piece(part, kind, any(h[0] <= a < h[1] for h in headings))


def _kinds(length: int, chunks: Sequence[Chunk]) -> Iterator[tuple[int, int, str]]:
    end = 0
    for chunk in chunks:
        yield end, chunk.start, ""
        yield chunk.start, chunk.end, "readable" if chunk.is_readable else "unreadable"
        end = chunk.end
    yield end, length, "tail"


def _edits(text: str) -> list[tuple[int, int, str]]:
    """Return replacements of text[start:end], in order, without overlap."""
    edits = []
    for match in _HEADING.finditer(text):
        edits += [(*match.span(name), "") for name in ("opening", "closing")]
    for match in _MARKS.finditer(text):
        edits.append((*match.span(), match["joined"] or UNKNOWN))
    if _IS_TOKENISED.search(text):
        edits += [(*match.span(), "") for match in _SPACES.finditer(text)]
    apart: list[tuple[int, int, str]] = []
    for edit in sorted(edits, key=lambda edit: (edit[0], -edit[1])):
        if not apart or edit[0] >= apart[-1][1]:
            apart.append(edit)
    return apart


def _edit(text: str, start: int, end: int, edits: Sequence[tuple[int, int, str]]) -> str:
    """Part text[start:end]; an edit across its end belongs to it as a whole."""
    part = ""
    for first, last, instead in edits:
        if last <= start or first >= end:
            continue
        if first >= start:
            part += text[start:first] + instead
        start = last
    return part + text[start:end]
