"""Flags of a memory that do not fit, and saved memories that are damaged: one line, and nothing
left.
"""

import shutil
from pathlib import Path

import pytest
import torch
from helpers.changed_stream import change_stream
from helpers.refusals import refused
from helpers.served import serving

from kvalign.app.cli.main import main
from kvalign.app.serve.service import Service
from kvalign.app.serve.settings import ServeSettings
from kvalign.foundation.errors import UserError
from kvalign.models.loading import load_model

MODEL = ["--model", "llama-mini"]
SINGLE = {
    "generate": ["generate", *MODEL, "--prompt", "The", "--method", "streaming-llm"],
    "chat": ["chat", *MODEL, "--say", "Hi", "--method", "streaming-llm"],
    "serve": ["serve", *MODEL, "--port", "0", "--method", "streaming-llm"],
}
EVALUATIONS = {
    name: ["eval", name, *MODEL, "--methods", "streaming-llm", "--cache-sizes", "128"]
    for name in (
        *("perplexity", "latency", "readability", "streameval", "needle", "told", "chat"),
        "attention",
    )
}
EVALUATIONS["edit"] = ["eval", "edit", *MODEL, "--methods", "streaming-llm"]
EVALUATIONS["recall"] = ["eval", "recall", "--model", "recall-llama", "--methods", "streaming-llm"]
ALL = {**SINGLE, **EVALUATIONS}
# Values that no command takes, by what is said of them.
FLAGS = [
    ("--memory=-1", "--memory must be at least 0, got -1"),
    (f"--memory={10**18}", f"--memory must be at most {10**12}, got {10**18}"),
    (f"--memory={10**30}", "--memory must be below 2^63"),
    ("--memory=", "--memory"),
    ("--memory=1e5", "--memory: invalid"),
    ("--memory=500 --num-recalled=0", "--num-recalled must be at least 1"),
    (f"--memory=500 --num-recalled={10**18}", "--num-recalled must be at most"),
    ("--memory=500 --recall-places=near", "--recall-places must be one of age, rank"),
    ("--memory=500 --recall-places=", "--recall-places is empty"),
]
# What is said once there is a model.
SIZES = [
    ("--memory=500 --num-recalled=900", "--num-recalled must be between 1 and"),
    ("--memory=500 --num-sinks=127", "memory needs a window of at least 2 entries"),
    ("--memory=3", "memory must be at least --num-recalled ("),
    ("--num-recalled=4", "--num-recalled, --recall-places and --recall-layers need a memory"),
    ("--memory=500 --recall-layers=9", "--recall-layers must be among the 6 layers"),
    ("--memory=500 --recall-layers=all", "--recall-layers must be numbers and ranges as 7,15-29"),
    ("--memory=500 --recall-layers=3-1", "--recall-layers must have ranges that go up"),
    ("--memory=500 --policy=h2o", "memory needs policy oldest"),
    ("--memory=0 --num-recalled=4", "need a memory: give "),
]
ONE_OF_EACH = ("generate", "perplexity")
ROWS = [(ALL["generate"], *row) for row in FLAGS]
ROWS += [(ALL[name], *row) for name in ONE_OF_EACH for row in SIZES]
ROWS += [(ALL[name], *SIZES[0]) for name in ALL if name not in ONE_OF_EACH]
ROWS += [
    (["generate", "--prompt", "The", *words.split()], "--memory=500", message)
    for words, message in (
        ("--model gpt2-mini --method streaming-llm", "needs an aligner on gpt2-mini"),
        ("--aligner kvalign-gpt2-mini-network", "need one that places each entry by itself"),
        ("--realign-every 4", "memory needs --realign-every 1"),
    )
]


@pytest.mark.parametrize(
    ("argv", "flags", "message"), ROWS, ids=[f"{' '.join(a[:2])} {f}"[:60] for a, f, _ in ROWS]
)
def test_flags(argv, flags, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    # One line is one line, however busy the machine is.
    monkeypatch.setattr("kvalign.foundation.progress.LINE_S", float("inf"))
    refused([*argv, *flags.split()], message, capfd)


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
    "no memory": (lambda t, a: a.update(memory=0), "need a memory: give"),
    "endless": (lambda t, a: a.update(memory=10**30), "memory must be"),
    "all recalled": (lambda t, a: a.update(num_recalled=10**6), "must be between 1 and"),
    "other places": (lambda t, a: a.update(recall_places="near"), "must be age or rank"),
    "another policy": (lambda t, a: a.update(policy="h2o"), "policy oldest"),
    "another method": (lambda t, a: a.update(method="recompute"), "cannot continue"),
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


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.99])
def test_conversations_cut_short(share, copied, capfd):
    whole = Path(TALK).read_bytes()
    Path(TALK).write_bytes(whole[: int(share * len(whole))])
    refused(GOING_ON, NOT_SAVED, capfd)


def test_a_conversation_keeps_its_own_memory(copied, capfd):
    refused([*GOING_ON, "--memory", "50"], "has its own --memory", capfd)
    refused([*GOING_ON, "--num-recalled", "8"], "has its own --num-recalled", capfd)


SERVED = dict(cache_size=20, memory=100, num_recalled=4, method="streaming-llm")


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """The folder of a session with a memory."""
    folder = tmp_path_factory.mktemp("sessions")
    loaded = load_model("llama-mini")
    with serving(loaded, sessions=folder, **SERVED) as server, server.client() as client:
        client.chat.completions.create(
            model="llama-mini",
            messages=[{"role": "user", "content": "Who lived on the island?"}],
            max_tokens=40,
            extra_body={"session": "one"},
        )
    return folder


@pytest.fixture(scope="module")
def served_model():
    return load_model("llama-mini")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["no keys", "cut short", "no memory file", "served otherwise"])
def test_sessions_with_a_damaged_memory(what, session, served_model, tmp_path):
    """One that is damaged is left alone, in one line; one of other sizes ends the start."""
    shutil.copytree(session, tmp_path / "talks")
    (path,) = (tmp_path / "talks").glob("*.safetensors")
    if what in DAMAGED:
        change_stream(path, DAMAGED[what][0], in_one=True)
    elif what == "cut short":
        path.write_bytes(path.read_bytes()[:1000])
    elif what == "no memory file":
        path.with_name(path.name + ".memory.0").unlink()
    how = SERVED | ({"memory": 50} if what == "served otherwise" else {})
    settings = ServeSettings(model="llama-mini", sessions=path.parent, **how)
    try:
        service = Service(settings, served_model)
        said, has_begun = service.folder_notes(), True
    except UserError as error:
        said, has_begun = str(error), False
    assert what != ("served otherwise" if has_begun else "cut short")
    assert said.startswith("not changed: ") or "use the former settings" in said
    assert path.name in said and "\n" not in said
