"""Suites that came from somewhere, and folders of results: refused in one line, before anything is
written or drawn.
"""

import json
from itertools import pairwise

import pytest
from helpers.refusals import refused, refuses
from helpers.results_example import documents

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
    "empty": ("", "it: Input should be"),
    "no cells": ("title: x", "cells: Field required"),
    "cells a number": ("cells: 3", "cells: Input should be"),
    "cells none": ("cells: []", "has no cells"),
    "key a list": ("? [a]\n: b\n", "is not YAML"),
    "key a number": (f"1: 2\n{CELLS}", "Keys should be strings"),
    "name a list": (named("[a]"), "name: Input should be"),
    "name a path": (named("../x"), "letters, digits and -"),
    "name long": (named("a" * 1000), "at most 100 letters"),
    "name twice": (CELLS + ONE, "two cells with the same name"),
    "command a list": ("cells:\n- {name: a, command: [eval]}", "command: Input should be"),
    "command empty": (command(""), "its command is empty"),
    "command unknown": (command("eval speed"), "unknown command 'eval speed'"),
    "command half": (command("eval"), "unknown command 'eval'"),
    "command no end": (command('eval perplexity --corpus "'), "No closing quotation"),
    "command a word more": (command("eval perplexity x"), "flags begin with --"),
    "command writes": (command("generate"), "generate is not an evaluation"),
    "command serves": (command("demo-ui"), "demo-ui is not an evaluation"),
    "command trains": (command("train"), "train is not an evaluation"),
    "command a suite": (command("eval run quick --out x"), "eval run is not an evaluation"),
    "command helps": (command("eval perplexity --help"), "leave out --help"),
    "number below": (command("eval perplexity --num-tokens 0"), "--num-tokens must be at least"),
    "variable unknown": (command("eval perplexity --corpus {x}"), "no variable 'x'"),
    "variable a number": (f"variables: {{a: 3}}\n{CELLS}", "variables.a: Input should be"),
    "prepare prints nothing": (
        f"prepare:\n- {{name: b, command: serve}}\n{CELLS}",
        "prints no document",
    ),
    "paper's table half": (f"paper: {{tables: [{{title: x}}]}}\n{CELLS}", "cell: Field required"),
    "field unknown": (f"{CELLS}more: 1", "more: Extra inputs"),
    "field of a cell unknown": ("cells:\n- {name: a, command: b, x: 1}", "x: Extra inputs"),
    "title a date": (f"title: 2020-01-01\n{CELLS}", "title: Input should be"),
    "alias bomb": (f"{BOMB}cells: *i\n", "cells.0: Input should be"),
    "alias bomb aside": (f"{BOMB}{CELLS}", "Extra inputs"),
}


@pytest.mark.parametrize(("text", "message"), SUITES.values(), ids=SUITES)
def test_suites(text, message):
    refuses(lambda: parse_suite(text, "s.yaml"), message)


@pytest.mark.parametrize("name", ["alias bomb", "key a list", "command serves", "cells none"])
def test_a_refused_suite_leaves_nothing(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    text, message = SUITES[name]
    (tmp_path / "s.yaml").write_text(text)
    refused(["eval", "run", "s.yaml", "--out", "o"], message, capfd)


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
    ("perplexity", placed([], "rows"), "rows: List should have"),
    ("perplexity", placed([{}], "rows"), "Field required"),
    ("perplexity", placed(None, "rows", 1), "rows.1: Input should be"),
    ("perplexity", placed("ten", "rows", 0, "perplexity"), "perplexity"),
    ("perplexity", placed(REMOVED, "rows", 0, "ratio"), "ratio"),
    ("perplexity", placed("wide", "rows", 0, "high"), "high"),
    ("perplexity", placed([{}], "rows", 0, "segments"), "segments"),
    ("perplexity", placed(3, "rows", 0, "bigrams"), "bigrams"),
    ("perplexity", placed(REMOVED, "rows", 0, "tokens", 1, "ratio"), "tokens"),
    ("perplexity", placed("64", "rows", 0, "cache_size"), "cache_size"),
    ("perplexity", placed(3, "rows", 0, "method"), "method"),
    ("perplexity", placed(-1, "rows", 0, "num_sinks"), "num_sinks"),
    ("perplexity", placed("dense", "settings", "corpus", "x"), ""),
    ("perplexity", placed("\ud800", "command"), "is not JSON"),
    ("total-time", placed(0, "rows", 0, "seconds"), "seconds"),
    ("latency", placed(-1.5, "rows", 1, "batch_size"), "batch_size"),
    ("latency", placed("fast", "rows", 1, "mean_ms"), "mean_ms"),
    ("latency", placed(None, "rows", 1, "bare_mean_ratio"), "bare_mean_ratio"),
    ("readability", placed(7, "rows", 0, "prompt"), "prompt"),
    ("readability", placed([["x"]], "rows", 0, "chunks"), "chunks"),
    ("readability", placed(1e-308, "rows", 0, "num_chunks"), "num_chunks"),
    ("readability", placed(REMOVED, "rows", 0, "no_repeat_ngram_size"), "no_repeat_ngram_size"),
    ("readability", placed("mine", "rule"), "rule"),
    ("chat", placed(REMOVED, "rows", 1), "answers"),
    ("streameval", placed("half", "rows", 0, "accuracy"), "accuracy"),
    ("attention", placed([], "rows", 0, "after", "by_head"), "by_head"),
    ("attention", placed(REMOVED, "rows", 0, "after", "by_entry"), "by_entry"),
]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    RESULTS,
    ids=[f"{n} {m} {i}" for i, (n, _, m) in enumerate(RESULTS)],
)
def test_results(name, change, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    document = documents()[name]
    if message == "":
        document["settings"]["corpus"] = {}
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / f"{name}.json").write_text(json.dumps(change(document)))
    refused(["report", "r"], message, capfd)
    refused(["report", "r", "--terminal"], message, capfd)
