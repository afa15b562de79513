"""Texts, paths, devices and suites that are none, folders of results that are not whole, and runs
that could be refused before their first write: one line, and nothing left.
"""

import json
import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from helpers.refusals import in_time, refused, refuses
from helpers.results_example import write_folder
from helpers.smaller import INSIDE

from kvalign.app.cli.main import main
from kvalign.app.commands.eval_run import parse_suite
from kvalign.models.loading import check_device

HALF = "an island \udcff of"  # as Python has a byte that is no UTF-8
CHAT = ["chat", "--model", "gpt2-mini", "--say", "Hi"]
CASES = [
    (["generate", "--prompt", HALF], "--prompt is not UTF-8: character 11 is U+DCFF"),
    (["generate", "--prompt-file", "halves.txt"], "halves.txt is not UTF-8"),
    ([*CHAT, "--state", "pipe"], "--state pipe cannot be written"),
    (["eval", "run", "pipe.yaml", "--out", "o"], "pipe.yaml is not a file but a pipe"),
]


@pytest.fixture
def place(tmp_path, monkeypatch, offline):
    """A folder with files that are no text."""
    monkeypatch.chdir(tmp_path)
    for name, value in INSIDE.items():
        monkeypatch.setattr(name, value)
    (tmp_path / "halves.txt").write_bytes(b"an island \xff\xfe")
    for name in ("pipe", "pipe.yaml"):
        os.mkfifo(tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(("argv", "message"), CASES, ids=[" ".join(a)[:50] for a, _ in CASES])
def test_texts_and_paths(argv, message, place, capfd):
    refused(argv, message, capfd)


def test_a_pipe_that_is_written_to_is_read(place, capfd):
    """As bash's <(...)."""
    argv = ["generate", "--prompt-file", "pipe", "--max-new-tokens", "2"]
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit((place / "pipe").write_text, "The island was")
        assert main(argv) == 0
        written.result()
    assert capfd.readouterr().out.startswith("The island was")


def test_ctrl_c_ends_a_long_prompt(place, monkeypatch, capfd):
    """Between two segments of it."""
    from kvalign.methods.cached import Cached

    parts, read = [], Cached._read

    def taken(self, ids):
        parts.append(ids.shape[1])
        if len(parts) > 1:
            raise KeyboardInterrupt
        return read(self, ids)

    monkeypatch.setattr(Cached, "_read", taken)
    argv = ["generate", "--prompt", "The island was " * 2000, "--max-new-tokens", "3"]
    with in_time():
        assert main(argv) == 0
    captured = capfd.readouterr()
    assert captured.out == "\n" and "0 tokens with kvalign" in captured.err
    assert len(parts) == 2 and parts[0] == 512


DEVICES = "meta cpu:99 cpu:-1 cpu:x mkldnn opengl fpga vulkan xla hpu mtia CPU cuda:10^9 tpu"


@pytest.mark.parametrize("device", [*DEVICES.split(), " ", "cuda:99999999999", "meta:0"])
def test_devices(device, place, capfd):
    refuses(lambda: check_device(device), f"device {device!r} is not available here")
    if device in ("meta", "cpu:99"):
        for argv in (
            ["generate", "--prompt", "The"],
            ["gen-data", "--out", "o"],
            ["pretrain", "--out", "o"],
            ["eval", "latency"],
            CHAT,
        ):
            refused([*argv, "--device", device], f"device {device!r} is not available", capfd)


EARLY = [
    ("train --data data --out o/p --accelerator gpu --target key", "--accelerator gpu"),
    ("train --data data --out o/p --key-hidden1 65536 --key-hidden2 65536", "of memory"),
    ("pretrain --out o/p --hidden-size 65536 --num-layers 1000", "of memory, "),
    ("eval run s.yaml --out o/p", "unknown method 'sink'"),
    ("chat --state o/p/t.safetensors --say Hi --model nowhere", "no model 'nowhere'"),
]


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recording") / "data"
    argv = ["gen-data", "--num-tokens", "600", "--chunk-len", "64", "--out", str(folder)]
    assert main(argv) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("words", "message"), EARLY, ids=[words[:50] for words, _ in EARLY])
def test_what_is_refused_leaves_nothing(words, message, place, recording, capfd):
    (place / "data").symlink_to(recording)
    cell = "{name: a, command: eval perplexity --methods sink}"
    (place / "s.yaml").write_text(f"cells:\n- {cell}\n")
    capfd.readouterr()
    refused(shlex.split(words), message, capfd)
    if not words.startswith("chat"):
        (place / "o" / "p").mkdir(parents=True)  # an empty folder of the user's stays, and empty
        refused(shlex.split(words), message, capfd)


ONE = "- {name: a, command: eval perplexity}\n"
SERVES = "- {name: b, command: serve}\n"
CELLS = f"cells:\n{ONE}"
ALIASES = "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghi"))
BOMB = f"a: &a [{', '.join('x' * 9)}]\n{ALIASES}"


def command(words):
    return "cells:\n- name: a\n  command: " + json.dumps(words)


SUITES = {
    "name twice": (CELLS + ONE, "two cells with the same name"),
    "command unknown": (command("eval speed"), "unknown command 'eval speed'"),
    "command serves": (command("serve"), "serve is not an evaluation"),
    "prepare prints nothing": (f"prepare:\n{SERVES}{CELLS}", "prints no document"),
    "alias bomb": (f"{BOMB}cells: *i\n", "cells.0: Input should be"),
}


@pytest.mark.parametrize(("text", "message"), SUITES.values(), ids=SUITES)
def test_suites(text, message):
    refuses(lambda: parse_suite(text, "s.yaml"), message)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("other.json", "{", "other.json is not JSON"),
        ("suite.yaml", "cells: [{name: a}]", "cells.0.command: Field required"),
    ],
)
def test_a_folder_with_another_file(name, text, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "r")
    (tmp_path / "r" / name).write_text(text)
    refused(["report", "r"], message, capfd)
