"""The three commands that the toolkit is known by, as they stand: in an empty folder, twice, for a
model that is not the default, and what each refuses.
"""

import os
from collections import Counter
from contextlib import ExitStack

import pytest
from helpers.smaller import ENOUGH_LABELS, INSIDE, TEXT
from transformers import PreTrainedTokenizerBase

from kvalign.aligners import Aligner
from kvalign.app.cli.main import main
from kvalign.app.commands import generate
from kvalign.app.commands.generate import BEYOND, PROMPT, tokens_past
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.methods import choice
from kvalign.methods.base import Method
from kvalign.methods.registry import METHODS

NETWORK = "kvalign-data/gpt2-mini/network"
TAKE = f"kvalign generate --method kvalign --aligner {NETWORK}"


@pytest.fixture
def kvalign(tmp_path, monkeypatch, capfd):
    """Runs a command in an empty folder, with little text; returns what it prints."""
    monkeypatch.chdir(tmp_path)
    for name, value in INSIDE.items():
        monkeypatch.setattr(name, value)
    documentation = "kvalign.data_gen.python_texts.python_docs"
    monkeypatch.setattr(documentation, lambda split: [TEXT[:12_000]])

    def run(command, code=0):
        assert main(command.split()) == code
        return capfd.readouterr()

    return run


def says_next(printed):
    return [line for line in printed.err.splitlines() if line.startswith("next")]


def test_a_method_that_only_feeds_is_enough(kvalign, monkeypatch):
    own = {"name": "mine", "about": "", "reset": lambda self: None}
    own["feed"] = lambda self, ids: self.model(ids).logits[:, -1]
    monkeypatch.setitem(METHODS, "mine", type("Mine", (Method,), own))
    done = kvalign("generate --method mine --cache-size 16 --max-new-tokens 3")
    assert "3 tokens with mine" in done.err


def test_a_method_is_chosen_checked_and_made_once(kvalign, monkeypatch):
    calls = Counter[str]()

    def count(target, name, counts=lambda *args: True):
        plain = getattr(target, name)

        def counted(*args, **keywords):
            calls[name] += counts(*args)
            return plain(*args, **keywords)

        monkeypatch.setattr(target, name, counted)

    count(choice, "choose")
    count(CacheSizes, "__post_init__")
    count(StreamingCache, "__init__")
    count(PreTrainedTokenizerBase, "__call__", lambda tokenizer, text: text == PROMPT)
    kvalign("generate --cache-size 16 --max-new-tokens 3")
    once = ("choose", "__post_init__", "__init__", "__call__")
    assert calls == dict.fromkeys(once, 1)


@pytest.mark.slow
def test_the_same_with_little_text_and_once_more(kvalign, tmp_path, monkeypatch):
    monkeypatch.setattr("kvalign.training.judge.ROW_LABELS", ENOUGH_LABELS)
    recorded = kvalign("gen-data")
    assert says_next(recorded) == ["next (takes minutes): kvalign train --target key"]
    key = kvalign("train --target key")
    assert says_next(key) == ["next (takes minutes): kvalign train --target value", f"next: {TAKE}"]
    value = kvalign("train --target value")
    assert says_next(value) == [f"next: {TAKE}"]
    aligner = Aligner.from_pretrained(tmp_path / NETWORK)
    assert aligner.config.training.keys() == {"key", "value"}
    assert "--data kvalign-data/gpt2-mini/caches" in aligner.config.training["key"]["command"]
    assert kvalign("generate --max-new-tokens 20").out.startswith(PROMPT)
    taken = kvalign(f"generate --max-new-tokens 20 --aligner {NETWORK}")
    assert "20 tokens with kvalign (network)" in taken.err and "was trained here" not in taken.err

    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    all_of = {"gen-data": recorded, "train --target key": key, "train --target value": value}
    for command, before in all_of.items():
        again = kvalign(command)
        assert again.out == before.out and "finished" in again.err
        assert len(says_next(again)) == 1, "with both networks there, only to stream is left"
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}


@pytest.mark.slow
def test_it_goes_past_the_context_length_unasked_and_marks_where(kvalign):
    printed = kvalign("generate --cache-size 32 --model recall-gpt2")
    assert printed.err.count("[token ") == 2 and "[token 33: the cache of 32" in printed.err
    end = "[token 257: the context length of 256 tokens ends here, the stream continues]"
    assert end in printed.err
    assert "[token" not in kvalign("generate --max-new-tokens 20").err
    assert tokens_past(None, 5) is None is tokens_past(8192, 5)
    assert tokens_past(1024, 24) == 1000 + BEYOND and tokens_past(512, 600) == BEYOND


@pytest.fixture
def standing_in(monkeypatch):
    """Puts a file in the place of standard input."""
    with ExitStack() as opened:
        yield lambda file: monkeypatch.setattr("sys.stdin", file and opened.enter_context(file))


def pipe(text=b"", closed=True):
    reader, writer = os.pipe()
    os.write(writer, text)
    if closed:
        os.close(writer)
    return os.fdopen(reader, encoding="utf-8"), writer


def test_a_prompt_is_read_where_it_is_piped(standing_in, tmp_path, kvalign):
    standing_in(pipe(b"The king of the sea\n")[0])
    printed = kvalign("generate --max-new-tokens 5 --seed 0")
    assert printed.out.startswith("The king of the sea ") and not says_next(printed)
    (tmp_path / "prompt.txt").write_text("In the harbour\n")
    standing_in((tmp_path / "prompt.txt").open())
    assert kvalign("generate --max-new-tokens 5 --seed 0").out.startswith("In the harbour ")
    standing_in(pipe(b"From a slow program")[0])
    printed = kvalign("generate --max-new-tokens 5 --seed 0 --prompt-file -")
    assert printed.out.startswith("From a slow program")
    for text, flag, message in (
        (b"\xff\xfe", "", "standard input is not UTF-8 text"),
        (b" \n", " --prompt-file -", "the prompt is empty"),
    ):
        standing_in(pipe(text)[0])
        assert message in kvalign("generate" + flag, code=2).err


def test_nothing_that_gives_no_prompt_is_waited_for(standing_in, monkeypatch, capfd):
    standing_in(None)
    assert generate.piped_text() == "" == generate.whole_text()
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert generate.piped_text() == ""
    standing_in(pipe()[0])
    assert generate.piped_text() == ""
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(generate, "QUIET_S", 0.01)
    monkeypatch.setattr(generate, "WAIT_S", 0.1)
    reader, writer = pipe(closed=False)
    standing_in(reader)
    assert generate.piped_text() == ""
    assert "waiting 0.1 s for a prompt on standard input" in capfd.readouterr().err
    os.close(writer)
    terminal, other = os.openpty()
    standing_in(os.fdopen(terminal))
    assert generate.piped_text() == ""
    os.close(other)
