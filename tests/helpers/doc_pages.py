"""The pages of the documentation as blocks of code."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]

# What is made of documents and of the code: `make tables` (helpers/result_tables.py).
MARKED = re.compile(
    r"(^<!-- (table|commands|texts|index|source|list): ([^\n]+) -->\n)(.*?)(^<!-- end -->)",
    re.DOTALL | re.MULTILINE,
)
_FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: python, bash, yaml, ...; "" if it has none.
        title: the file that it shows, if it has one.
        section: the heading of the second level that it stands under.
        line: of its first fence, counted from 1.
    """

    language: str
    title: str
    text: str
    section: str
    line: int


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order, without excerpts of the code; every fence must be one
    of theirs.
    """
    text = MARKED.sub(_without_source, (ROOT / page).read_text(encoding="utf-8"))
    found = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()]
        section = re.findall(r"^## (.+)$", before, re.MULTILINE)[-1:]
        language, title, code = match.groups()
        line = before.count("\n") + 1
        found.append(Block(language, title or "", code, section[0] if section else "", line))
    assert text.count("```") == 2 * len(found), f"{page}: a fence that is not understood"
    return found


def _without_source(match: re.Match[str]) -> str:
    """Nothing in place of an excerpt, so that lines keep their numbers."""
    return "\n" * match[0].count("\n") if match[2] == "source" else match[0]


def lines_of(text: str) -> Iterator[list[str]]:
    """The words of each line of a shell block, continued lines joined, comments left out."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words
