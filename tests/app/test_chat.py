"""`kvalign chat`: one conversation over several runs, its opening kept as sinks."""

import io
import itertools
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest

from kvalign import checkpoints
from kvalign.app.cli.main import main
from kvalign.models.loading import load_model
from kvalign.streaming.turns import opening_len, turn_ids

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
        (["--say", "a", "--top-p", "2"], "--top-p must be at most 1, got 2"),
        (["--say", "a", "--state", "talk", "--num-evicted", "5"], "has its own --num-evicted"),
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


def said(path, loaded):
    from kvalign import load_stream

    return load_stream(path, loaded.model, loaded.tokenizer)


def test_a_conversation_takes_new_sampling_flags_and_keeps_them(tmp_path, capsys):
    path, loaded = tmp_path / "talk.safetensors", load_model("gpt2-mini")
    flags = ["--state", str(path), "--say"]
    assert chat(*flags, "Who?") == 0
    assert chat(*flags, "Why?", "--top-p", "0.5", "--max-new-tokens", "200", "--seed", "7") == 0
    for _ in range(2):
        sampling = said(path, loaded).sampling
        assert (sampling.top_p, sampling.seed) == (0.5, 7)
        assert sampling.top_k == 20 and sampling.stop_at_end
        capsys.readouterr()
        assert main(["chat", *flags, "When?"]) == 0
        assert "--top-p 0.5 --seed 7; kept in" in capsys.readouterr().err
    assert said(path, loaded).sampling.max_new_tokens == 200


@pytest.fixture(scope="module")
def warm_model(tmp_path_factory):
    """gpt2-mini with a generation_config that says how to sample, as instructed models have."""
    folder = shutil.copytree(
        checkpoints.model_path("gpt2-mini"), tmp_path_factory.mktemp("models") / "warm"
    )
    path = folder / "generation_config.json"
    how = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.1}
    path.write_text(json.dumps(json.loads(path.read_text()) | how))
    return str(folder)


def test_a_conversation_samples_as_its_model_says(warm_model, capsys):
    options = ["--model", warm_model, "--method", "discard-half", "--say", "Who?"]
    assert chat(*options) == 0
    banner = capsys.readouterr().err.splitlines()[0]
    assert "--temperature 0.6 --top-k 20 --top-p 0.95 --seed 0 --repetition-penalty 1.1" in banner
    assert "(--temperature, --top-p, --repetition-penalty: of the model's generation_config)" in (
        banner
    )
    assert chat(*options, "--top-p", "1", "--json") == 0
    used = json.loads(capsys.readouterr().out)["settings"]
    assert (used["temperature"], used["top_p"], used["seed"]) == (0.6, 1.0, 0)
    assert chat(*options, "--temperature", "0", "--json") == 0
    greedy = answers(capsys)
    assert chat(*options, "--temperature", "0", "--seed", "9", "--json") == 0
    assert answers(capsys) == greedy


def test_generate_has_defaults_of_its_own(warm_model, capsys):
    """They do not depend on the model: methods and models are compared by them."""
    how = ["--method", "window", "--max-new-tokens", "5", "--prompt", "It", "--json"]
    assert main(["generate", "--model", warm_model, *how]) == 0
    used = json.loads(capsys.readouterr().out)["settings"]
    assert (used["temperature"], used["top_k"], used["top_p"]) == (1.0, 20, 1.0)
    assert used["do_sample"] and used["max_new_tokens"] == 5
    seeds = {used["seed"]}
    for _ in range(2):
        assert main(["generate", *how]) == 0
        printed = capsys.readouterr()
        seeds.add(json.loads(printed.out)["settings"]["seed"])
        assert f"--seed {json.loads(printed.out)['settings']['seed']}" in printed.err
    assert len(seeds) == 3


PIPED = """Who?
/help
/tokens
/system
/system Be brief.
/save
/save kept
Why?
/sav it
/etc/hosts?
/reset
/tokens
/save other
When?
/exit
never said
"""


def test_commands_in_a_conversation(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").write_text("mine")
    monkeypatch.setattr("sys.stdin", io.StringIO(PIPED))
    assert chat("--system", "You know.") == 0
    printed = capsys.readouterr()
    turns = [line for line in printed.out.splitlines() if line.startswith("> ")]
    assert turns == ["> Who?", "> Why?", "> /etc/hosts?", "> When?"]
    assert printed.out.startswith("> Who?\n") and "\n\n> Why?\n" in printed.out
    for line in (
        "/save [FILE]  keep the conversation in FILE, from now on after each answer",
        "34 tokens; in the cache: 33, of 40 at most; evicted: 0; not fed yet: 1",
        "a conversation begins with it: kvalign chat --system TEXT",
        "\nYou know.\n",
        "[12 tokens by kvalign (table-kl), cut by --max-new-tokens 12, ",
        "/save needs a file: /save talk.safetensors",
        "saved: kept; it goes on with kvalign chat --state kept",
        "unknown command '/sav'; did you mean /save? (known: /help, /tokens, ",
        "the conversation begins anew; kept is written after the next answer",
        "0 tokens; in the cache: 0, of 40 at most; evicted: 0; not fed yet: 0",
        "other exists: name another file",
    ):
        assert line in printed.err, line
    assert (tmp_path / "other").read_text() == "mine"
    loaded = load_model("gpt2-mini")
    ids = said("kept", loaded).ids
    begins = turn_ids(loaded.tokenizer, "When?", True, "You know.")
    assert ids[: len(begins)] == begins and len(ids) <= len(begins) + 12

    monkeypatch.setattr("sys.stdin", io.StringIO("/reset\nWhen?\n/tokens now\n"))
    assert main(["chat", "--state", "kept"]) == 0
    assert "/tokens takes nothing, got 'now'" in capsys.readouterr().err
    assert said("kept", loaded).ids[: len(begins)] == begins, "its --system is in the file"


def test_the_document_of_a_conversation_that_goes_on_has_its_own_settings(tmp_path, capsys):
    path = str(tmp_path / "talk.safetensors")
    first = ["--system", "You know.", "--method", "discard-half", "--state", path, "--say", "Who?"]
    assert chat(*first, "--json") == 0
    begun = json.loads(capsys.readouterr().out)
    assert main(["chat", "--state", path, "--say", "Why?", "--json"]) == 0
    resumed = json.loads(capsys.readouterr().out)
    assert begun["settings"] | {"say": "Why?"} == resumed["settings"]
    used = resumed["settings"]
    assert (used["cache_size"], used["system"], used["method"]) == (40, "You know.", "discard-half")
    opening = opening_len(load_model("gpt2-mini").tokenizer, "You know.")
    assert used["num_sinks"] == opening and used["max_new_tokens"] == 12
    assert resumed["answers"][0]["is_cut"]


def test_ctrl_c_says_what_is_in_the_file(tmp_path, monkeypatch, capsys):
    def lines():
        yield "/save talk"
        yield "Who?"
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvalign.app.sessions.conversation.turns", lambda say: lines())
    assert chat() == 130
    kept = "talk holds the conversation up to its last answer; to go on: kvalign chat --state talk"
    assert capsys.readouterr().err.endswith(f"\nkvalign chat: interrupted; {kept}\n")
    monkeypatch.setattr(
        "kvalign.app.sessions.conversation.turns", lambda say: itertools.islice(lines(), 1, 9)
    )
    assert chat() == 130
    assert capsys.readouterr().err.endswith("\nkvalign chat: interrupted\n")


def test_an_answer_that_cannot_be_kept_is_said_below_it(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError("cannot write talk: no space left")

    monkeypatch.setattr("kvalign.streaming.stream_file.write", full)
    assert chat("--say", "Who?", "--state", str(tmp_path / "talk")) == 1
    printed = capsys.readouterr()
    assert printed.out.endswith("\n") and len(printed.out) > 10
    assert "error: this answer is not kept: cannot write talk: no space left\n" in printed.err


def test_the_banner_says_what_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("Who\x1b[2J?\n"))
    assert chat("--state", "talk", "--method", "streaming-llm") == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines()[0] == (
        "gpt2-mini by streaming-llm, cache of 40 entries, 4 sinks; "
        "--max-new-tokens 12 --top-k 20 --seed 0; kept in talk"
    )
    assert "\x1b" not in printed.out.splitlines()[0]
    assert chat("--state", "talk", "--say", "Why?") == 0
    assert "; kept in talk, " in capsys.readouterr().err
