"""Suites that came from somewhere, and folders of results: refused in one line, before anything is
written or drawn.
"""

import json
from itertools import pairwise

import pytest
from helpers.refusals import refused, refuses
from helpers.results_example import documents, write_folder

from kvalign.app.suites.cells import parse_suite

ONE = "- {name: a, command: eval perplexity}\n"
CELLS = f"cells:\n{ONE}"
ALIASES = "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghi"))
BOMB = f"a: &a [{', '.join('x' * 9)}]\n{ALIASES}"


def command(words):
    return "cells:\n- name: a\n  command: " + json.dumps(words)


def named(name):
    return f"cells:\n- {{name: {name}, command: eval perplexity}}\n"


SUITES = {
    "no cells": ("title: x", "cells: Field required"),
    "key a list": ("? [a]\n: b\n", "is not YAML"),
    "key a number": (f"1: 2\n{CELLS}", "Keys should be strings"),
    "name a path": (named("../x"), "letters, digits and -"),
    "name twice": (CELLS + ONE, "two cells with the same name"),
    "command unknown": (command("eval speed"), "unknown command 'eval speed'"),
    "command no end": (command('eval perplexity --corpus "'), "No closing quotation"),
    "command serves": (command("demo-ui"), "demo-ui is not an evaluation"),
    "command helps": (command("eval perplexity --help"), "leave out --help"),
    "number below": (command("eval perplexity --num-tokens 0"), "--num-tokens must be at least"),
    "variable unknown": (command("eval perplexity --corpus {x}"), "no variable 'x'"),
    "prepare prints nothing": (
        f"prepare:\n- {{name: b, command: serve}}\n{CELLS}",
        "prints no document",
    ),
    "paper's table half": (f"paper: {{tables: [{{title: x}}]}}\n{CELLS}", "cell: Field required"),
    "field unknown": (f"{CELLS}more: 1", "more: Extra inputs"),
    "alias bomb": (f"{BOMB}cells: *i\n", "cells.0: Input should be"),
}


@pytest.mark.parametrize(("text", "message"), SUITES.values(), ids=SUITES)
def test_suites(text, message):
    refuses(lambda: parse_suite(text, "s.yaml"), message)


def placed(value, *path):
    """A document with a value at a path; `REMOVED` takes what is there."""

    def change(document):
        *above, last = path
        place = document
        for key in above:
            place = place[key]
        if value is REMOVED:
            del place[last]
        else:
            place[last] = value
        return document

    return change


REMOVED = object()
RESULTS = [
    ("perplexity", placed("eval speed", "kind"), "unknown evaluation"),
    ("perplexity", placed(REMOVED, "settings"), "settings: Field required"),
    ("perplexity", placed(REMOVED, "rows", 0, "segments", 0, "ratio"), "rows.segments: each needs"),
    ("perplexity", placed([], "rows"), "rows: List should have"),
    ("perplexity", placed("ten", "rows", 0, "perplexity"), "perplexity"),
    ("perplexity", placed("\ud800", "command"), "is not JSON"),
    ("readability", placed(1e-308, "rows", 0, "num_chunks"), "num_chunks"),
    ("chat", placed(REMOVED, "rows", 1), "answers"),
    ("edit", placed("moved", "rows", 1, "kind"), "rows.1.kind"),
    ("edit", placed("edited, $x$", "rows", 1, "way"), "must be a way to go on"),
    ("edit", placed(REMOVED, "rows", 1, "ratio"), "rows.ratio"),
    ("edit", placed(None, "rows", 0, "ratio_low"), "rows.ratio: each row needs it"),
    ("attention", placed(REMOVED, "rows", 0, "after", "by_entry"), "by_entry"),
]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    RESULTS,
    ids=[f"{n} {m} {i}" for i, (n, _, m) in enumerate(RESULTS)],
)
def test_results(name, change, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / f"{name}.json").write_text(json.dumps(change(documents()[name])))
    refused(["report", "r"], message, capfd)
    refused(["report", "r", "--terminal"], message, capfd)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("other.json", "{", "other.json is not JSON"),
        ("other.json", "[1]", "must hold a JSON object"),
        ("suite.yaml", "cells: [", "is not YAML"),
        ("suite.yaml", "cells: []\npaper: {tables: [{title: x}]}", "tables.0.cell: Field required"),
    ],
)
def test_a_folder_with_another_file(name, text, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "r")
    (tmp_path / "r" / name).write_text(text)
    refused(["report", "r"], message, capfd)
