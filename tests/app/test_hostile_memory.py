"""Flags of a memory that do not fit, and saved memories that are damaged: one line, and nothing
left.
"""

import shutil
from pathlib import Path

import pytest
import torch
from helpers.changed_stream import change_stream
from helpers.refusals import refused

from kvalign.app.cli.main import main

MODEL = ["--model", "llama-mini"]
SINGLE = {
    "generate": ["generate", *MODEL, "--prompt", "The", "--method", "streaming-llm"],
    "chat": ["chat", *MODEL, "--say", "Hi", "--method", "streaming-llm"],
    "serve": ["serve", *MODEL, "--port", "0", "--method", "streaming-llm"],
}


def of_memory(change):
    """A change of the first layer's keys."""
    name = "method.0.memory.0"
    return lambda t, a: t.update({name: change(t[name]).contiguous()})


def more_seen(tensors, about):
    tensors["method.seen"] += 10**6


DAMAGED = {
    "no keys": (lambda t, a: t.pop("method.0.memory.0"), "a stream's 0.memory.0 must be"),
    "no numbers": (of_memory(lambda x: x * float("nan")), "its entries"),
    "more seen": (more_seen, "must be"),
    "a smaller memory": (lambda t, a: a.update(memory=3), "memory must be at least"),
}


TALK, MEMORY = "talk.safetensors", "talk.safetensors.memory.0"
GOING_ON = [*SINGLE["chat"][:-2], "--state", TALK, "--max-new-tokens", "2"]


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    """The folder of a conversation with a memory."""
    folder = tmp_path_factory.mktemp("talk")
    argv = [*SINGLE["chat"], "--state", str(folder / TALK), "--cache-size", "20"]
    argv += ["--max-new-tokens", "60", "--memory", "100", "--num-recalled", "4"]
    assert main(argv) == 0
    return folder


@pytest.fixture
def copied(talk, tmp_path, monkeypatch):
    """A copy of it, which is the current folder."""
    shutil.copytree(talk, tmp_path / "talk")
    monkeypatch.chdir(tmp_path / "talk")


@pytest.mark.parametrize("what", DAMAGED)
def test_conversations_with_a_damaged_memory(what, copied, capfd):
    change, message = DAMAGED[what]
    change_stream(Path(TALK), change, in_one=True)
    refused(GOING_ON, message, capfd)


def of_file(**changes):
    """A change of what a stream says of the file of its memory."""
    return lambda t, a: a["memory_file"].update(changes)


def of_empty(shape):
    """Another shape of the keys that stand for those in the file."""
    return lambda t, a: t.update({"method.0.memory.0": torch.empty(shape)})


NOT_SAVED = "is not a stream that kvalign saved"
WRONG_PLACES = {
    "another file": (of_file(number=1), f"{MEMORY[:-1]}1, which is missing: copy both files"),
    "no such file": (of_file(number="../x"), "memory_file.number: Input should be"),
    "more of it": (of_file(end=10**30), "is damaged: it is shorter than"),
    "less of it": (of_file(end=5), NOT_SAVED),
    "another part": (of_file(first=30), NOT_SAVED),
    "no place": (lambda t, a: a.update(memory_file=None), "a stream's 0.memory.0 must be"),
    "no checksums": (lambda t, a: t.pop("memory.crc32"), NOT_SAVED),
    "other checksums": (lambda t, a: t["memory.crc32"].add_(1), "its checksum differs"),
    "empty": (of_empty((1, 0, 0, 0)), "is damaged: its checksum differs"),
    "flat": (of_empty((0,)), NOT_SAVED),
    "two rows": (of_empty((2, 2, 0, 8)), NOT_SAVED),
    "no keys": (
        lambda t, a: [t.pop(name) for name in list(t) if ".memory." in name],
        NOT_SAVED,
    ),
}


@pytest.mark.parametrize("what", WRONG_PLACES)
def test_conversations_that_say_another_place_of_their_memory(what, copied, capfd):
    change, message = WRONG_PLACES[what]
    change_stream(Path(TALK), change)
    refused(GOING_ON, message, capfd)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Path.unlink, f"{TALK} has its memory in {MEMORY}, which is missing: copy both files"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is shorter than"),
        (lambda path: path.write_bytes(b"\1" + path.read_bytes()[1:]), "its checksum differs"),
        (lambda path: (path.unlink(), path.mkdir()), "which is missing"),
    ],
)
def test_a_memory_whose_file_is_not_the_one_that_was_written(change, message, copied, capfd):
    change(Path(MEMORY))
    refused(GOING_ON, message, capfd)


def test_a_conversation_keeps_its_own_memory(copied, capfd):
    refused([*GOING_ON, "--memory", "50"], "has its own --memory", capfd)
    refused([*GOING_ON, "--num-recalled", "8"], "has its own --num-recalled", capfd)
