"""Figures of the pages have a source: a document, a command or a page that stands beside them."""

import re

import pytest
from helpers.doc_pages import ROOT

CARDS = sorted((ROOT / "checkpoints").glob("*/README.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "eval" / "results").glob("*.md"))
# A decimal, or a number with a unit. The level of an interval is no measurement.
UNITS = r"(?:ms|µs|s|seconds?|minutes?|hours?|[kMG]i?B|times)\b|%"
FIGURE = re.compile(rf"(?<![\w.-])(?!95 %)(?:\d+\.\d+(?!\w|\.\d)|\d[\d ]*(?:\.\d+)? ?(?:{UNITS}))")
# What is made from documents, a block of commands, a link, a command or a file in a sentence.
MARKED = r"<!-- (?:table|commands|index|texts|list): "
SOURCE = re.compile(
    rf"{MARKED}|^```(?:bash|python)|\]\((?!#)\S+\)|\]\[\w+\]"
    r"|`(?:OMP_NUM_THREADS=\d )?(?:kvalign|make|python|pytest) [^`]+`|`[\w/]+\.(?:py|yaml)`",
    re.MULTILINE,
)
# What shows no figure: the head of a card, code, what is made from documents, targets of links.
NO_FIGURE = re.compile(
    rf"\A---\n.*?^---$|^```.*?^```$|^{MARKED}.*?^<!-- end -->|`[^`]*`|\]\([^)]*\)",
    re.DOTALL | re.MULTILINE,
)


def sections(text):
    """Yield heading and text of each part of a page; the lines of code begin with no heading."""
    text = re.sub(r"^```.*?^```$", lambda m: m[0].replace("\n#", "\n #"), text, flags=re.S | re.M)
    head, *rest = re.split(r"^(#+ .+)$", text, flags=re.MULTILINE)
    yield from [("", head), *zip(rest[::2], rest[1::2], strict=True)]


def figures(text):
    return FIGURE.findall(NO_FIGURE.sub("", text))


def without_source(text):
    return [
        f"{heading}: {', '.join(found)}"
        for heading, part in sections(text)
        if (found := figures(part)) and not SOURCE.search(part)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_section_with_figures_has_a_source(page):
    assert without_source(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.parent.name)
def test_a_card_has_the_command_that_made_it(card):
    text = card.read_text(encoding="utf-8")
    assert figures(text) and re.search(r"kvalign (?:train|tune|pretrain) .*--out", text)


def test_a_figure_without_a_source_is_found():
    page = "# Page\n\n`x=3.0` is 95 % sure.\n\n## Time\n\n```\n# 1.5 s\n```\n\n{}A step takes {}.\n"
    for figure in ("2.5 ms", "1 200 MB", "0.99", "17 %", "twice, 3.1 times,"):
        assert len(without_source(page.format("", figure))) == 1
        for source in ("[Measured](speed.md). ", "`kvalign eval latency --json`: "):
            assert without_source(page.format(source, figure)) == []
        assert without_source(page.format("```bash\nmake demo\n```\n", figure)) == []
    assert without_source(page.format("", "as long in version 2.13.0")) == []
