"""`kvalign chat`: one conversation over several runs, its opening kept as sinks."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
from helpers.chatting import answers, chat, said
from helpers.patience import PATIENCE_S
from helpers.served import serving
from helpers.tiny_models import tiny_model

import kvalign
from kvalign.app.cli.main import main
from kvalign.app.sessions import conversation
from kvalign.app.sessions.conversation import Conversation, ConversationSettings
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import locked
from kvalign.memory import plan
from kvalign.methods import make_method
from kvalign.models.loading import load_model
from kvalign.streaming.chat import Chat
from kvalign.streaming.turns import Talk

# What was typed, what readline may write after it, and the first character of the answer.
ANSWER_BEGINS = rb"Who\?\r\n(\x1b\[\?2004l\r)?[^\x1b]"


def test_a_conversation_goes_on_after_a_restart(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("Who?\n\n  \nWhy?\nWhen?\n"))
    assert chat("--json") == 0
    at_once = answers(capsys)
    assert len(at_once) == 3 and all(at_once)
    one_by_one = []
    for turn in ("Who?", "Why?", "When?"):
        assert chat("--json", "--state", "talk.safetensors", "--say", turn) == 0
        one_by_one += answers(capsys)
    assert one_by_one == at_once


def test_the_file_names_the_model(tmp_path, capsys):
    path = str(tmp_path / "talk.safetensors")
    how = ["--model", "llama-mini", "--weights", "int8"]
    assert chat(*how, "--state", path, "--say", "Who?") == 0
    capsys.readouterr()
    assert main(["chat", "--state", path, "--say", "Why?", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    used = document["settings"]
    assert (used["model"], used["weights"], used["cache_size"]) == ("llama-mini", "int8", 40)
    assert document["answers"][0]["is_cut"]
    assert main(["chat", "--state", path, "--say", "Why?", "--model", "gpt2-mini"]) == 2
    assert "it is a stream of llama-mini" in capsys.readouterr().err


def test_turns_that_are_out_of_the_cache_are_marked(tmp_path, monkeypatch, capsys, loaded):
    monkeypatch.chdir(tmp_path)
    lines = "Who?\nWhy?\nWhen?\n/save talk\n/memory\n/reset\n/memory\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert chat("--method", "streaming-llm") == 0
    err = capsys.readouterr().err
    marks = [line for line in err.splitlines() if line.startswith("[the first")]
    assert marks == ["[the first turn is out of the cache]"]  # no memory works without an aligner
    assert "in the cache: 40 tokens, at most 40; the first 4 are never evicted\n" in err
    assert "tokens (the first turn is out of the cache)\n" in err and "--memory" not in err
    assert "conversation: 3 turns, " in err and "conversation: 0 turns, 0 tokens" in err
    stream = said("talk", loaded)
    begins = list(map(int, stream.notes["turns"].split()))
    gone = [place for place in range(stream.num_fed) if place not in stream.method.cache.index()]
    assert {*range(4, begins[1])} <= {*gone} and not {*range(4, begins[2])} <= {*gone}

    assert main(["chat", "--state", "talk", "--json", "--say", "Where?", "--say", "Who?"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["num_forgotten_turns"] for one in document["answers"]] == [2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "works"),
    [("llama", True), ("phi3", True), ("gemma3_text", False), ("gptj", False), ("gpt2", False)],
)
def test_a_memory_is_offered_where_one_works(kind, works):
    """Keys of Gemma 3 rotate by layer, GPT-J hides its queries, GPT-2 has no aligner here."""
    model, sizes = tiny_model(kind), {"cache_size": 7}
    stream = SimpleNamespace(method=make_method("streaming-llm", model, warn=False, **sizes))
    stream.notes = {}
    assert bool(Chat.memory_offer(SimpleNamespace(stream=stream))) == works
    with nullcontext() if works else pytest.raises(UserError, match="memory"):
        make_method("streaming-llm", model, memory=100, warn=False, **sizes)


def begun(model="gpt2-mini", **flags):
    """The sizes of a conversation as its command begins."""
    settings = ConversationSettings(model=model, cache_size=40, **flags)
    return Conversation(settings, settings.load()).stream.method.sizes


NO_MEMORY = {
    "turned off": dict(memory=0),
    "it does not help": dict(model="llama-mini"),
    "stale entries": dict(method="streaming-llm"),
    "nothing is kept": dict(method="discard-half"),
    "guesses": dict(lookup=4),
    "turns go": dict(evict="turns"),
    "a policy": dict(method="kvalign", policy="random"),
    "several at once": dict(method="kvalign", num_evicted="2"),
    "a network": dict(aligner="kvalign-gpt2-mini-network"),
}


@pytest.mark.parametrize("flags", NO_MEMORY.values(), ids=NO_MEMORY)
def test_there_is_no_memory_where_it_would_not_help(flags, capsys):
    assert begun(**flags).memory == 0
    assert "memory" not in capsys.readouterr().err


def test_there_is_a_memory_where_it_helps_as_large_as_there_is_room(monkeypatch, capsys):
    """A token of gpt2-mini takes 15 kB, of half of what is free. Fewer than the cache are none."""
    for room, num in ((None, 100_000), (10**9, 32_552), (10**6, 0)):
        monkeypatch.setattr("kvalign.streaming.chat.free_bytes", lambda room=room: room)
        sizes = begun()
        assert (sizes.memory, sizes.num_recalled) == (num, 8 * bool(num))
        line = f"a memory keeps up to {num} evicted tokens, 15 kB each"
        assert (line in capsys.readouterr().err) == bool(num)


@pytest.mark.slow
def test_a_model_is_measured_once(monkeypatch, capsys):
    """A large one waits for `kvalign tune-memory`, and Python measures nothing."""
    monkeypatch.setattr(plan, "PLANS", "none")  # nothing ships
    loaded = load_model("context-gpt2")
    assert begun("context-gpt2").memory == 0
    monkeypatch.setattr(conversation, "LARGEST_MEASURED", 10**8)
    for num in (1, 0):
        in_python = kvalign.chat(loaded.model, loaded.tokenizer, cache_size=40).stream.method.sizes
        sizes = begun("context-gpt2")
        assert sizes.memory and in_python.memory == (0 if num else sizes.memory)
        assert capsys.readouterr().err.count("measuring once") == num


def test_what_a_memory_holds_is_not_said_to_be_forgotten(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Who?\nWhy?\nWhen?\n/memory\n"))
    assert chat("--model", "llama-mini", "--memory", "100") == 0
    err = capsys.readouterr().err
    assert "[the first turn is out of the cache, in the memory]" in err
    assert re.search(r"in the memory: \d+ tokens, at most 100.*\nforgotten: 0 tokens", err)
    stream = SimpleNamespace(ids=[0] * 200, num_fed=200, num_evicted=160, notes={})
    stream.method = SimpleNamespace(sizes=CacheSizes(40, 4, memory=100, num_recalled=8))
    talk = SimpleNamespace(stream=stream, begins=[0, 9], forgotten_in_words=lambda: "")
    assert Chat.in_words(talk).endswith(
        "in the memory: 100 tokens, at most 100, to be taken back\nforgotten: 68 tokens"
    )


@pytest.mark.slow
def test_what_is_kept_never_goes(tmp_path, capsys, loaded):
    path = tmp_path / "talk"
    turns = ["--say", "Who?", "--say", "Why?", "--say", "When?"]
    for _ in range(2):  # the same words go on
        assert chat("--num-sinks", "system", "--state", str(path), *turns) == 0
    stream, num = said(path, loaded), Talk(loaded.tokenizer).opening_len()
    assert stream.method.sizes.num_sinks == num and stream.num_evicted
    assert stream.method.cache.index()[:num].tolist() == list(range(num))
    assert "(known" not in capsys.readouterr().err


TURNS = ("Who?", "Where? " * 4, "When?", "So?")


@pytest.mark.slow
def test_whole_turns_go_as_in_serve(tmp_path, monkeypatch, capsys, loaded):
    monkeypatch.chdir(tmp_path)
    say = [word for turn in TURNS for word in ("--say", turn)]
    flags = "--model gpt2-mini --cache-size 64 --max-new-tokens 10 --evict turns --json"
    plain = "--repetition-penalty 1 --temperature 0 --system"
    chat = ["chat", *flags.split(), *plain.split(), "You know islands."]
    assert main([*chat, *say]) == 0
    document = json.loads(capsys.readouterr().out)
    texts = [one["text"] for one in document["answers"]]
    gone = [one["num_forgotten_turns"] for one in document["answers"]]
    assert gone[0] == 0 and gone == sorted(gone) and len({*gone}) > 2

    served, reencoded = [], []
    messages = [{"role": "system", "content": "You know islands."}]
    with serving(loaded, cache_size=64, evict="turns") as server, server.client() as client:
        for turn in TURNS:
            messages.append({"role": "user", "content": turn})
            reply = client.chat.completions.create(
                model="gpt2-mini", messages=messages, temperature=0, max_tokens=10
            )
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            served.append(reply.choices[0].message.content)
            reencoded.append(reply.usage.kvalign["reencoded_tokens"])
    assert texts == served and not reencoded[0] and any(reencoded)

    one_by_one = []
    for number, turn in enumerate(TURNS):  # the file keeps --evict turns
        begin = chat if not number else ["chat", "--json"]
        assert main([*begin, "--state", "talk", "--say", turn]) == 0
        one_by_one += answers(capsys)
    assert one_by_one == texts
    stream = said("talk", loaded)
    assert len(stream.ids) > 64 + 10 and stream.method.fill <= 64
    monkeypatch.setattr("sys.stdin", io.StringIO("/memory\n/reset\n/memory\n"))
    assert main(["chat", "--state", "talk"]) == 0
    err = capsys.readouterr().err
    assert f"(the first {gone[-1]} turns are out of the cache)" in err
    assert "conversation: 0 turns, 0 tokens" in err and err.count("out of the cache)") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--say", " "], "--say is empty"),
        (["--say", "a", "--system", "word " * 60], "--system takes"),
        (["--say", "a", "--num-sinks", "all"], "must be auto or system or a number, got 'all'"),
        (["--say", "a", "--state", "talk", "--num-evicted", "5"], "has its own --num-evicted"),
        (["--say", "a", "--state", "text"], "is not a stream that kvalign saved"),
    ],
)
def test_wrong_use_is_one_line(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("no stream")
    if "talk" in flags:
        assert chat("--say", "Who?", "--state", "talk") == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert chat(*flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def _read_until(fd, pattern, timeout_s=PATIENCE_S):
    got, end = b"", time.monotonic() + timeout_s
    while not re.search(pattern, got):
        ready, _, _ = select.select([fd], [], [], max(0, end - time.monotonic()))
        assert ready, got
        got += os.read(fd, 4096)


def _interrupt(process, ours, pattern):
    """Ctrl-C at a prompt, which readline shows before it waits: in between, the next wakes it."""
    for _ in range(6):
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        with suppress(AssertionError):
            return _read_until(ours, pattern, timeout_s=10)
    raise AssertionError(f"no {pattern!r}")


@pytest.mark.slow
def test_ctrl_c_in_a_terminal():
    """It stops an answer, at an idle prompt it warns, and the second one there leaves."""
    ours, theirs = pty.openpty()
    command = "-m kvalign chat --model gpt2-mini --max-new-tokens 1000000"
    there = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    words = [sys.executable, *command.split()]
    process = subprocess.Popen(words, **there, start_new_session=True)
    try:
        _read_until(ours, b"> ")
        os.write(ours, b"Who?\n")
        _read_until(ours, ANSWER_BEGINS)
        process.send_signal(signal.SIGINT)
        _read_until(ours, rb"(?s)tokens with kvalign.*\n(\x1b\[\?2004h)?> ")
        _interrupt(process, ours, rb"(?s)Ctrl-C again leaves, like Ctrl-D.*> ")
        _interrupt(process, ours, rb"kvalign chat: interrupted")
        assert process.wait(timeout=PATIENCE_S) == 130
    finally:
        process.kill()
        os.close(ours)
        os.close(theirs)


PIPED = """Who?
/help
/memory
/system
/system Be brief.
/save
/save kept
Why\x1b[2J?
/sav it
/etc/hosts?
/reset
/memory
/save other
When?
/exit
never said
"""


def test_commands_in_a_conversation(tmp_path, monkeypatch, capsys, loaded):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").write_text("mine")
    monkeypatch.setattr("sys.stdin", io.StringIO(PIPED))
    assert chat("--system", "You know.") == 0
    printed = capsys.readouterr()
    turns = [line for line in printed.out.splitlines() if line.startswith("> ")]
    assert turns == ["> Who?", "> Why␛[2J?", "> /etc/hosts?", "> When?"]
    assert printed.out.startswith("> Who?\n") and "\n\n> Why␛[2J?\n" in printed.out
    assert "\ngpt2-mini with kvalign (table-network-context), cache of 40 entries, " in printed.err
    assert "; no chat template, so turns are plain text" in printed.err
    for line in (
        "/save [FILE]  save the conversation to FILE, now and after each answer",
        "conversation: 1 turns, 34 tokens\nin the cache: 33 tokens, at most 40; the first ",
        "it can only be set at the start: kvalign chat --system TEXT",
        "\nYou know.\n",
        "[12 tokens with kvalign (table-network-context), cut by --max-new-tokens 12 "
        "(/continue goes on), ",
        "/save needs a file: /save talk.safetensors",
        "saved: kept; continue it with kvalign chat --state kept",
        "unknown command '/sav'; did you mean /save? (known: /help, /continue, /memory, ",
        "the conversation starts again; kept is written after the next answer",
        "conversation: 0 turns, 0 tokens\nin the cache: 0 tokens, at most 40; the first ",
        "other exists: name another file",
    ):
        assert line in printed.err, line
    assert (tmp_path / "other").read_text() == "mine"
    ids = said("kept", loaded).ids
    begins = Talk(loaded.tokenizer, "You know.").turn_ids("When?", True)
    assert ids[: len(begins)] == begins and len(ids) <= len(begins) + 12

    monkeypatch.setattr("sys.stdin", io.StringIO("/reset\nWhen?\n/memory now\n"))
    assert main(["chat", "--state", "kept"]) == 0
    assert "/memory takes no argument, got 'now'" in capsys.readouterr().err
    assert said("kept", loaded).ids[: len(begins)] == begins, "its --system is in the file"


def test_ctrl_c_says_what_is_in_the_file(tmp_path, monkeypatch, capsys):
    def lines(say):
        yield "/save talk"
        yield "Who?"
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvalign.app.commands.chat.turns", lines)
    assert chat() == 130
    kept = "talk holds the conversation up to its last answer; to go on: kvalign chat --state talk"
    assert capsys.readouterr().err.endswith(f"\nkvalign chat: interrupted; {kept}\n")


@pytest.mark.slow
def test_a_file_that_others_have_is_not_overwritten(tmp_path, monkeypatch, capsys):
    """A live server, which has the folder, or a program that changed the file meanwhile."""
    path, others = tmp_path / "talk", []
    assert chat("--say", "Who?", "--state", str(path)) == 0
    with locked(tmp_path):
        assert chat("--say", "Why?", "--state", str(path)) == 2
    assert "wait for it, or name another folder" in capsys.readouterr().err

    def lines():
        assert chat("--say", "Why?", "--state", str(path)) == 0
        others.append(path.read_bytes())
        yield "When?"

    monkeypatch.setattr(
        "kvalign.app.commands.chat.turns", lambda say: iter(say) if say else lines()
    )
    assert chat("--state", str(path)) == 1
    error = f"this answer was not saved: {path} was since changed by another program"
    assert error in capsys.readouterr().err
    assert [path.read_bytes()] == others
