"""The pages of edits and pieces show what their Python prints."""

import re

import pytest
from helpers.doc_pages import blocks


@pytest.mark.parametrize("page", ["edit", "pieces"])
def test_what_the_page_shows_is_what_it_prints(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks(f"docs/tutorials/{page}.md"):
        if block.language == "python":
            exec(compile(block.text, page, "exec"), names)
            printed = capsys.readouterr().out
            beside = re.findall(r"  # (.+)$", block.text, re.MULTILINE)
            assert [line.strip() for line in printed.splitlines()][: len(beside)] == beside
        elif block.language == "text":
            assert printed.endswith(block.text)
