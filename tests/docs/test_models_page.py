"""The page of models has a row for each architecture, and names tests that are there."""

import re
from pathlib import Path

from helpers.doc_lists import architectures

from kvalign.models.architectures import FAMILIES, REGISTERED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


def table():
    return [line.strip("| ").split(" | ") for line in architectures().splitlines()]


def test_there_is_a_row_for_each():
    titles, _, *rows = table()
    assert [row[:2] for row in rows] == [[f"`{kind}`", FAMILIES[kind]] for kind in FAMILIES]
    assert {len(row) for row in (titles, *rows)} == {4}
    of_registry = {row[0].strip("`") for row in rows if row[3] == "of the registry"}
    assert of_registry == {*REGISTERED}
    sees = {row[0].strip("`"): row[2] for row in rows}
    assert sees["llama"] == "all" and sees["gemma3_text"] == "all, or 4096"
    assert sees["mistral"] == "4096" and sees["gpt_oss"] == "all, or 128"


def test_it_is_in_the_site_and_names_what_is_there():
    assert "<!-- list: architectures -->" in PAGE.splitlines()
    assert "Models: models.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for name in re.findall(r"tests/[\w/]+\.py", PAGE):
        assert (ROOT / name).is_file()
