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

import pytest

from kvalign.app.cli import main
from kvalign.models import load_model
from kvalign.turns import opening_len, turn_ids

# What was typed, what readline may write after it, and the first character of the answer.
ANSWER_BEGINS = rb"Who\?\r\n(\x1b\[\?2004l\r)?[^\x1b]"
SMALL = ["--cache-size", "40", "--max-new-tokens", "12", "--seed", "0"]


def chat(*flags):
    return main(["chat", *SMALL, *flags])


def answers(capsys):
    return [a["text"] for a in json.loads(capsys.readouterr().out)["answers"]]


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


def test_answers_are_printed_as_text(capsys):
    assert chat("--say", "Who?") == 0
    text = capsys.readouterr().out
    assert chat("--say", "Who?", "--json") == 0
    assert text == answers(capsys)[0] + "\n"


def test_the_system_prompt_stays(tmp_path):
    loaded, system = load_model("gpt2-mini"), "You know all islands."
    opening = turn_ids(loaded.tokenizer, "Who?", True, system)[
        : opening_len(loaded.tokenizer, system)
    ]
    assert loaded.tokenizer.decode(opening) == f"{system}\n\nUSER:"
    from kvalign import load_stream

    path = tmp_path / "talk.safetensors"
    for turn in ("Who?", "Why?", "When?"):
        flags = ["--state", str(path), "--say", turn]
        assert chat(*flags, *(["--system", system] if not path.exists() else [])) == 0
    stream = load_stream(path, loaded.model, loaded.tokenizer)
    method = stream.method
    assert method.sizes.num_sinks == len(opening) and len(stream.ids) > method.sizes.cache_size + 10
    assert method.cache.index()[: len(opening)].tolist() == list(range(len(opening)))
    assert stream.ids[: len(opening)] == opening


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--say", " "], "--say is empty"),
        (["--say", "a", "--num-sinks", "few"], "--num-sinks must be auto or a number, got 'few'"),
        (["--say", "a", "--system", "word " * 60], "--system takes"),
        (["--say", "a", "--method", "sinks"], "unknown method 'sinks'"),
        (["--say", "a", "--state", "talk", "--top-k", "5"], "has its own --top-k"),
        (["--say", "a", "--state", "talk", "--system", "b"], "has its own --system"),
        (["--say", "a", "--state", "talk", "--method", "window"], "has its own --method"),
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


def _read_until(fd, pattern, timeout_s=60):
    got, end = b"", time.monotonic() + timeout_s
    while not re.search(pattern, got):
        ready, _, _ = select.select([fd], [], [], max(0, end - time.monotonic()))
        assert ready, got
        got += os.read(fd, 4096)


def test_in_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_ends():
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "kvalign", "chat", "--max-new-tokens", "1000000"]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    try:
        _read_until(ours, b"> ")
        os.write(ours, b"Who?\n")
        _read_until(ours, ANSWER_BEGINS)
        process.send_signal(signal.SIGINT)
        _read_until(ours, rb"(?s)tokens by kvalign.*\n> ")
        os.write(ours, b"\x04")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        os.close(ours)
        os.close(theirs)
