"""Suites that came from somewhere, and folders of results: refused in one line, before anything is
written or drawn.
"""

import json
from itertools import pairwise

import pytest
from helpers.refusals import refused, refuses
from helpers.results_example import write_folder

from kvalign.app.suites.cells import parse_suite

ONE = "- {name: a, command: eval perplexity}\n"
CELLS = f"cells:\n{ONE}"
ALIASES = "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghi"))
BOMB = f"a: &a [{', '.join('x' * 9)}]\n{ALIASES}"


def command(words):
    return "cells:\n- name: a\n  command: " + json.dumps(words)


SUITES = {
    "name twice": (CELLS + ONE, "two cells with the same name"),
    "command unknown": (command("eval speed"), "unknown command 'eval speed'"),
    "command serves": (command("demo-ui"), "demo-ui is not an evaluation"),
    "prepare prints nothing": (
        f"prepare:\n- {{name: b, command: serve}}\n{CELLS}",
        "prints no document",
    ),
    "alias bomb": (f"{BOMB}cells: *i\n", "cells.0: Input should be"),
}


@pytest.mark.parametrize(("text", "message"), SUITES.values(), ids=SUITES)
def test_suites(text, message):
    refuses(lambda: parse_suite(text, "s.yaml"), message)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("other.json", "{", "other.json is not JSON"),
        ("suite.yaml", "cells: []\npaper: {tables: [{title: x}]}", "tables.0.cell: Field required"),
    ],
)
def test_a_folder_with_another_file(name, text, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "r")
    (tmp_path / "r" / name).write_text(text)
    refused(["report", "r"], message, capfd)
