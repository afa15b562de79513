"""The command line: help names everything, wrong use is one line and exit code 2."""

import dataclasses
import json

import pytest
from helpers.smaller import INSIDE
from helpers.uncompiled_step import not_compiled

from kvalign.app.cli.catalogue import COMMANDS, GROUPS, Command
from kvalign.app.cli.main import main
from kvalign.foundation.settings import flag


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_flag(command, capsys):
    for kind, cls in Command(command).all_settings().items():
        assert main([*command.split(), *kind.split(), "--help"]) == 0
        out = capsys.readouterr().out
        for field in dataclasses.fields(cls):
            positional = field.metadata["positional"]
            assert (field.name.upper() if positional else flag(field.name)) in out
        assert "example:\n  kvalign" in out
        assert all(len(line) <= 80 for line in out.splitlines()) and "default: True" not in out
        assert all(about.count("(default") <= 1 for about in out.split("\n  --"))


def test_usage_has_ten_commands_on_its_first_screen_and_all_others_behind_it(capsys):
    assert len(COMMANDS) <= 31 and sum(map(len, GROUPS.values())) == len(COMMANDS)
    *first, _ = GROUPS.values()
    ten = [name for group in first for name in group]
    for words, described in ((["--help"], ten), (["-h"], ten), (["--help", "all"], COMMANDS)):
        assert main(words) == 0
        out = capsys.readouterr().out
        for name, about in COMMANDS.items():
            joined = " ".join(out.split())
            is_described = out.count(f"\n  {name} ") == 1 and about in joined
            assert is_described == (name in described) and name in joined
        assert all(len(line) <= 80 for line in out.splitlines())
        assert described is COMMANDS or (len(ten) == 10 and len(out.splitlines()) <= 24)


REMOVED_WORDS = {
    "demo-ui": "kvalign serve answers",
    "completion bash": "register-python-argcomplete kvalign",
    "eval chat --model x": "kvalign eval told",
    "eval import-losses": "eval/results/paper.md",
    "train anchored": "table-network",
    "methods --json": "kvalign list methods",
    "generate --prompt x --aligner kvalign-gpt2-mini-anchored": "table-network",
}


@pytest.mark.parametrize(("words", "instead"), REMOVED_WORDS.items())
def test_what_was_removed_says_in_a_line_what_to_use_instead(words, instead, capsys):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert "was removed" in error and instead in error and error.count("\n") == 1


def test_a_first_word_alone_lists_its_commands(capsys):
    names = {name for name in COMMANDS if name.startswith("eval ")}
    assert names == {name for name in COMMANDS if " " in name}  # it is the only such word
    assert main(["eval", "--help"]) == 0
    printed = capsys.readouterr().out
    assert main(["eval"]) == 2
    assert capsys.readouterr().err == printed
    listed = [line for line in printed.splitlines() if line.startswith("  eval ")]
    assert len(listed) == len(names)
    for name in names:
        assert any(line.startswith(f"  {name} ") for line in listed)
        assert COMMANDS[name] in " ".join(printed.split())


PROMPT = ["--prompt", "The island"]
WRONG = [
    ([], "usage: kvalign"),
    (["generat"], "unknown command 'generat'; did you mean generate?"),
    (["generate", "--promt", "x"], "unrecognized arguments: --promt"),
    (["generate", *PROMPT, "--prompt-file", "x"], "either --prompt or --prompt-file"),
    (["generate", *PROMPT, "--max-tokens", "5"], "--max-tokens 5; did you mean --max-new-tokens?"),
    (["generate", *PROMPT, "--greedy"], "did you mean --no-do-sample?"),
    (
        ["generate", *PROMPT, "--num-evicted", "third"],
        "takes numbers or half, quarter, eighth, got 'third'",
    ),
    (
        ["eval", "perplexity", "--corpus", "text:short.txt"],
        "name a longer text, or smaller --num-tokens or --cache-sizes",
    ),
    (
        ["eval", "readability", "--text", "short.txt", "--top-k", "1", "--methods", "window"],
        "--text judges existing text: --methods, --top-k would have no effect",
    ),
    (["train", "network"], "no finished recording of gpt2-mini in kvalign-data/gpt2-mini"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG, ids=[" ".join(argv)[:70] for argv, _ in WRONG])
def test_wrong_use_is_one_line_and_code_2(argv, message, offline, tmp_path, monkeypatch, capfd):
    for name, value in INSIDE.items():
        monkeypatch.setattr(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("a few words only\n")
    assert main(argv) == 2
    captured = capfd.readouterr()
    assert message in captured.err
    assert captured.out == ""
    if argv:
        assert len(captured.err.strip().splitlines()) == 1
    assert not (tmp_path / "d").exists() and not (tmp_path / "a").exists()


def test_a_stored_step_is_taken_by_itself(capfd, monkeypatch):
    """And --no-compile leaves it."""
    found = not_compiled(monkeypatch)
    monkeypatch.setattr("kvalign.steppers.stored.is_empty", lambda: False)
    argv = ["generate", *PROMPT, "--method", "streaming-llm", "--cache-size", "16", "--seed", "0"]
    texts = {}
    for flags in ((), ("--no-compile",)):
        found.clear()
        assert main([*argv, *flags, "--max-new-tokens", "40", "--json"]) == 0
        out, err = capfd.readouterr()
        document = json.loads(out)
        texts[flags] = document["text"]
        assert document["settings"]["compile"] == (flags == ()) == bool(found)
        assert (" ms/token with stored steps; " in err) == (flags == ())
    assert len(set(texts.values())) == 1


@pytest.mark.parametrize(("given", "num_sinks"), [("prompt", 2), ("5", 5)])
def test_what_is_kept_of_a_prompt_are_the_sinks(given, num_sinks, capsys):
    argv = ["generate", *PROMPT, "--cache-size", "16", "--max-new-tokens", "3", "--json"]
    assert main([*argv, "--num-sinks", given]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["num_sinks"] == num_sinks
    assert main([*argv, "--num-sinks", "prompt", "--cache-size", "2"]) == 2
    error = "--num-sinks prompt takes 2 entries: --cache-size must be above that"
    assert error in capsys.readouterr().err
    assert main([*argv, "--num-sinks", "all"]) == 2
    assert "--num-sinks must be prompt or a number, got 'all'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_policy_and_the_end_of_its_kept_positions_are_said(capfd):
    argv = ["generate", *PROMPT, "--cache-size", "32", "--seed", "0"]
    assert main([*argv, "--policy", "h2o", "--max-new-tokens", "40", "--json"]) == 0
    used = json.loads(capfd.readouterr().out)["settings"]
    assert (used["policy"], used["positions"], used["num_recent"]) == ("h2o", "compact", 8)
    keep = "--model recall-gpt2 --method streaming-llm --policy key-norm --positions keep --top-k 1"
    assert main([*argv, *keep.split(), "--max-new-tokens", "600"]) == 0
    end = "the stream ends here: the model has no more positions\n255 tokens with streaming"
    assert end in capfd.readouterr().err
