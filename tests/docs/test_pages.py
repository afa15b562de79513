"""Pages are read where they lie, on a code host or in a clone: what is generated is there and true,
and every link leads to text.
"""

import posixpath
import re
import string

import pytest
from helpers.doc_lists import architectures
from helpers.doc_pages import MARKED, ROOT
from helpers.excerpts import excerpt
from helpers.result_tables import filled

from kvalign.foundation.errors import UserError
from kvalign.models.architectures import FAMILIES, REGISTERED

# Pages of docs/reference are made when the site is built; no other page leads there.
READ = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "eval/results").glob("*.md")]
READ += [x for y in ("checkpoints/*/README", "examples/*", "hub/*/*") for x in ROOT.glob(f"{y}.md")]
READ = sorted(str(p.relative_to(ROOT)) for p in READ if "reference" not in p.parts)
CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|^\[[\w-]+\]: (\S+)|<img src=\"([^\"]+)\"", re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


def anchors(page):
    """The anchors of a page's headings, as code hosts make them."""
    marks = string.punctuation.replace("-", "").replace("_", "")
    text = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    titles = [re.sub(r"\]\([^)]*\)|\]\[\w+\]", "", title) for title in HEADING.findall(text)]
    return {t.lower().translate(str.maketrans(" ", "-", marks)) for t in titles}


def dead_links(page, text):
    dead = []
    for link in map("".join, LINK.findall(CODE.sub("", text))):
        if re.match(r"https?:|mailto:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (
            posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) if target else page
        )
        if not (ROOT / path).exists() or path.startswith("docs/reference/"):
            dead.append(f"{page}: {link}")
        elif anchor and path.endswith(".md") and anchor not in anchors(path):
            dead.append(f"{page}: {link} (no such heading)")
    return dead


@pytest.mark.parametrize("page", READ)
def test_links_lead_to_text_and_tests_are_there(page):
    text = text_of(page)
    assert dead_links(page, text) == []
    for paragraph in text.split("\n\n"):
        if not re.search(r"(?:commits?|checkout of)\s[0-9a-f]{7}", paragraph):  # history has it
            tests = re.findall(r"tests/[\w/]+\.py", paragraph)
            assert [name for name in tests if not (ROOT / name).is_file()] == []


def test_a_link_to_nothing_is_found():
    for link in ("x.md", "reference/python.md", "code.md#no-such-heading", "#neither"):
        assert len(dead_links("docs/models.md", f"[a]({link})")) == 1
    assert dead_links("docs/models.md", "[a](code.md#1-the-loop) `[b](x.md)`") == []


@pytest.mark.parametrize("page", READ)
def test_nothing_waits_for_a_site_to_be_built(page):
    assert not re.search(r"\{\{|^:::|\]\[kvalign\.", CODE.sub("", text_of(page)), re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    [page for page in READ if {"source", "list"} & {m[2] for m in MARKED.finditer(text_of(page))}],
)
def test_what_pages_take_from_the_code_is_up_to_date(page):
    text = text_of(page)
    assert text == filled(text, words=("source", "list")), f"{page} is not up to date: make tables"


def test_the_page_of_models_says_what_layers_see():
    assert "<!-- list: architectures -->" in text_of("docs/models.md").splitlines()
    titles, _, *rows = (line.strip("| ").split(" | ") for line in architectures().splitlines())
    assert [row[:2] for row in rows] == [[f"`{kind}`", FAMILIES[kind]] for kind in FAMILIES]
    assert {len(row) for row in (titles, *rows)} == {4}
    assert {row[0].strip("`") for row in rows if row[3] == "of the registry"} == {*REGISTERED}
    sees = {row[0].strip("`"): row[2] for row in rows}
    assert sees["llama"] == "all" and sees["gemma3_text"] == "all, or 4096"
    assert sees["mistral"] == "4096" and sees["gpt_oss"] == "all, or 128"


def test_an_excerpt_has_no_docstring_and_its_names_are_there():
    shown = excerpt("kvalign.policies.base.KeyNorm.score")
    assert shown.startswith(
        "[`kvalign/policies/base.py`](../kvalign/policies/base.py), `KeyNorm.score`"
    )
    assert "def score(" in shown and '"""' not in shown
    for name in ("kvalign.policies.base.KeyNorm.no", "kvalign.policies.no.KeyNorm"):
        with pytest.raises(UserError, match=name):
            excerpt(name)
