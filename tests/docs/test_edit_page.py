"""The page of edits shows what its Python prints."""

import re

from helpers.doc_pages import blocks


def test_what_the_page_shows_is_what_it_prints(capsys):
    names = {}
    for block in blocks("docs/tutorials/edit.md"):
        if block.language == "python":
            exec(compile(block.text, "edit.md", "exec"), names)
            printed = capsys.readouterr().out
            beside = re.findall(r"  # (.+)$", block.text, re.MULTILINE)
            assert [line.strip() for line in printed.splitlines()][: len(beside)] == beside
        elif block.language == "text":
            assert printed.endswith(block.text)
