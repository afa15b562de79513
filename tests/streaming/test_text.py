"""Streams of text: pieces joined are the text, more input at any time, and a stream saved in a file
goes on to the token.
"""

import copy
import itertools
import json
import shutil

import pytest
import torch
from helpers.pairwise import one_of_each
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import kvalign
from kvalign.foundation.errors import UserError
from kvalign.methods.registry import METHODS
from kvalign.streaming.stream_file import checksum

PROMPT = "The history of the island"


@pytest.fixture(scope="module")
def gpt2(minis):
    return minis["gpt2-mini"]


def begin(loaded, prompt=PROMPT, **options):
    options = dict(cache_size=24, max_new_tokens=40, seed=0) | options
    return kvalign.stream(loaded.model, loaded.tokenizer, prompt, **options)


def change_stream(path, change):
    """Change the tensors of a file and what it says, with the checksum of that: with another one
    nothing else would be looked at.
    """
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors, about = load_file(path), json.loads(metadata["stream"])
    change(tensors, about)
    metadata["stream"] = json.dumps(about)
    metadata["sha256"] = checksum(metadata["stream"], tensors)
    save_file(tensors, path, metadata)


def test_pieces_are_the_text_of_the_tokens(gpt2):
    stream = begin(gpt2, no_repeat_ngram_size=2)
    text = "".join(stream)
    assert text == stream.text and len(stream.token_ids) == 40
    whole = gpt2.tokenizer.decode(stream.ids)
    assert whole.startswith(PROMPT + text) and len(whole) <= len(PROMPT + text) + 1
    assert len(set(itertools.pairwise(stream.ids))) == len(stream.ids) - 1
    assert list(stream) == [] and stream.timing()["num_tokens"] == 40


@pytest.mark.parametrize("name", [n for n in METHODS if n != "dense"])
def test_input_in_the_middle_is_as_if_it_had_been_said(name, gpt2):
    stream = begin(gpt2, method=name, top_k=1, max_new_tokens=20)
    "".join(stream)
    answer = list(stream.token_ids)
    stream.feed(" The river was")
    second = gpt2.tokenizer(" The river was")["input_ids"]
    assert stream.token_ids == [] and stream.ids[-len(second) :] == second
    "".join(stream)
    method = kvalign.make_method(name, gpt2.model, cache_size=24)
    logits = method.feed(torch.tensor([gpt2.tokenizer(PROMPT)["input_ids"]]))
    for token in answer[:-1]:
        logits = method.feed(torch.tensor([[token]]))
    logits = method.feed(torch.tensor([[answer[-1], *second]]))
    assert stream.token_ids[0] == int(logits.argmax()) and len(stream.token_ids) == 20


def test_an_end_token_ends_until_more_is_fed(gpt2, monkeypatch):
    free = begin(gpt2)
    "".join(free)
    end = free.token_ids[7]
    monkeypatch.setattr(gpt2.model.generation_config, "eos_token_id", end)
    stream = begin(gpt2, stop_at_end=True)
    "".join(stream)
    until = free.token_ids.index(end) + 1
    assert stream.token_ids == free.token_ids[:until] and list(stream) == []
    before = len(stream.ids)
    stream.feed(" and")
    assert len(stream.ids) == before and end not in stream.ids[-2:]
    assert next(iter(stream))


@pytest.mark.parametrize(("name", "model_name"), one_of_each(METHODS, ["gpt2-mini", "llama-mini"]))
def test_a_saved_stream_goes_on_to_the_token(name, model_name, minis, tmp_path):
    path = tmp_path / "talk.safetensors"
    one = minis[model_name]
    options = dict(method=name, no_repeat_ngram_size=3, temperature=0.9, seed=4, max_new_tokens=30)
    options["cache_size"] = 64 if name == "dense" else 16
    if name == "kvalign":
        options["aligner"] = f"kvalign-{model_name}-network"  # the kind that keeps most
    stream = begin(one, **options)
    first = "".join(itertools.islice(stream, 18))
    stream.save(path)
    again = kvalign.load_stream(
        path, one.model, one.tokenizer, aligner=options.get("aligner") or None
    )
    assert again.text == first and again.ids == stream.ids
    assert "".join(again) == "".join(stream) and again.ids == stream.ids
    for both in (stream, again):
        both.feed(" The river")
    again.save(path)  # with input that is not fed yet
    again = kvalign.load_stream(path, one.model, one.tokenizer, aligner=options.get("aligner"))
    assert list(again) == list(stream) and again.text == stream.text != ""


@pytest.mark.slow
def test_a_loaded_stream_takes_other_sampling(gpt2, tmp_path):
    """Draws go on unless there is another seed; a seed makes it repeatable."""
    path = tmp_path / "talk.safetensors"
    stream = begin(gpt2, seed=4, temperature=0.9, max_new_tokens=20)
    "".join(stream)
    stream.notes["by"] = "us"
    stream.save(path)
    stream.feed(" and")

    def goes_on(**sampling):
        again = kvalign.load_stream(path, gpt2.model, gpt2.tokenizer, **sampling)
        assert again.notes == {"by": "us"} and again.sampling.temperature == 0.9
        assert again.sampling.seed == (sampling.get("seed") or 4)
        again.feed(" and")
        "".join(again)
        return again.token_ids

    "".join(stream)
    assert goes_on() == goes_on(seed=4) == goes_on(seed=None) == stream.token_ids
    assert goes_on(max_new_tokens=5) == stream.token_ids[:5]
    assert goes_on(seed=5) == goes_on(seed=5) != stream.token_ids
    assert len(set(goes_on(repetition_penalty=50.0, max_new_tokens=30))) == 30
    with pytest.raises(ValueError, match="top_k must be at least 0, got -1"):
        kvalign.load_stream(path, gpt2.model, gpt2.tokenizer, top_k=-1)


@pytest.mark.slow
def test_another_tokenizer_is_refused(gpt2, tmp_path):
    """But not one to which tokens were added."""
    path = tmp_path / "talk.safetensors"
    stream = begin(gpt2)
    list(itertools.islice(stream, 30))
    stream.save(path)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(100)}, "w0"))
    other = PreTrainedTokenizerFast(tokenizer_object=words)
    with pytest.raises(ValueError, match="made with another tokenizer: give that of gpt2-mini"):
        kvalign.load_stream(path, gpt2.model, other)
    more = copy.deepcopy(gpt2.tokenizer)
    more.add_tokens(["<more>"])
    expected = list(stream)
    assert list(kvalign.load_stream(path, gpt2.model, more)) == expected


WRONG_FILES = {
    "another model": (lambda t, a: a.update(identity="0" * 32), "of gpt2-mini: the weights of"),
    "another format": (
        lambda t, a: a.update(format=2),
        "has format 2, and this version of kvalign",
    ),
    "no format": (lambda t, a: a.pop("format"), "has format None, and this version of kvalign"),
    "another aligner": (lambda t, a: a.update(aligner="0" * 64), "made with another aligner"),
    "missing field": (lambda t, a: a.pop("num_fed"), "num_fed: Field required"),
    "another field": (lambda t, a: a.update(num_moons=1), "its fields are not those of a stream"),
    "half the layers": (lambda t, a: t.pop("method.3.entries.0"), "3.entries.0 must be"),
}


@pytest.fixture(scope="module")
def saved(gpt2, tmp_path_factory):
    """The file of a stream that has evicted."""
    path = tmp_path_factory.mktemp("saved") / "talk.safetensors"
    stream = begin(gpt2)
    list(itertools.islice(stream, 30))
    stream.save(path)
    return path


def test_a_file_of_which_a_byte_is_another_is_damaged(gpt2, saved, tmp_path):
    """Tokens, cache and what the file says of them are one: none can be of another stream."""
    data = saved.read_bytes()
    changes = {
        "sizes": data.replace(b'\\"cache_size\\":24', b'\\"cache_size\\":23'),
        "tensors": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    }
    for what, changed in changes.items():
        assert changed != data, what
        path = tmp_path / what
        path.write_bytes(changed)
        with pytest.raises(ValueError, match="is damaged: its checksum differs"):
            kvalign.load_stream(path, gpt2.model, gpt2.tokenizer)


@pytest.mark.parametrize("what", WRONG_FILES)
def test_a_wrong_file_is_one_line(what, gpt2, saved, tmp_path):
    path = shutil.copy(saved, tmp_path)
    change, message = WRONG_FILES[what]
    change_stream(path, change)
    with pytest.raises(ValueError, match=message) as caught:
        kvalign.load_stream(path, gpt2.model, gpt2.tokenizer)
    assert "\n" not in str(caught.value)


def test_a_token_whose_text_is_torn_does_not_come_twice(gpt2, monkeypatch):
    """Neither in the ids nor in the text: the stream is refused, and begins anew after `reset`."""
    expected = list(begin(gpt2, do_sample=False))
    stream = begin(gpt2, do_sample=False)
    list(itertools.islice(stream, 3))

    def torn(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(stream._answer, "take", torn)
    with pytest.raises(KeyboardInterrupt):
        next(iter(stream))
    monkeypatch.undo()
    with pytest.raises(UserError, match="interrupted within a step"):
        next(iter(stream))
    stream.reset()
    stream.feed(PROMPT)
    assert list(stream) == expected


def test_a_loop_of_ones_own(gpt2):
    """`make_cache` gives the cache that `stream` uses."""
    cache = kvalign.make_cache(gpt2.model, cache_size=24)
    stream = begin(gpt2, top_k=1)
    "".join(stream)
    ids = torch.tensor([gpt2.tokenizer(PROMPT)["input_ids"]])
    tokens = []
    with torch.no_grad():
        for _ in range(40):
            logits = gpt2.model(input_ids=ids, past_key_values=cache, use_cache=True).logits
            ids = logits[:, -1:].argmax(-1)
            tokens.append(int(ids))
    assert tokens == stream.token_ids
    with pytest.raises(ValueError, match=r"has no streaming cache \(these have one: window,"):
        kvalign.make_cache(gpt2.model, cache_size=24, method="recompute")


def test_a_prompt_that_is_kept_never_goes(minis):
    mini = minis["llama-mini"]
    prompt, how = "The history of the island", dict(cache_size=20, seed=0, max_new_tokens=40)
    whole = kvalign.stream(mini.model, mini.tokenizer, prompt, keep="prompt", **how)
    num = len(whole.ids)
    list(whole)
    assert whole.num_evicted and whole.method.sizes.num_sinks == num
    assert whole.method.cache.index()[:num].tolist() == list(range(num))
    counted = kvalign.stream(mini.model, mini.tokenizer, prompt, num_sinks=num, **how)
    list(counted)
    assert whole.ids == counted.ids
    with pytest.raises(kvalign.UserError, match="keep must be 'prompt', got 'all'"):
        kvalign.stream(mini.model, mini.tokenizer, prompt, keep="all")
    with pytest.raises(kvalign.UserError, match="set the same number"):
        kvalign.stream(mini.model, mini.tokenizer, prompt, keep="prompt", num_sinks=3)


@pytest.mark.parametrize("name", ["kvalign", "discard-half"])
def test_a_stream_that_is_reset_is_a_new_one(name, gpt2, tmp_path):
    stream = begin(gpt2, "Ships came", method=name, top_k=1, max_new_tokens=20)
    "".join(stream)
    stream.reset()
    assert (stream.ids, stream.num_fed, stream.text) == ([], 0, "")
    stream.save(tmp_path / "talk")
    for one in (stream, kvalign.load_stream(tmp_path / "talk", gpt2.model, gpt2.tokenizer)):
        one.feed(PROMPT)
        assert list(one) == list(begin(gpt2, method=name, top_k=1, max_new_tokens=20))
        assert one.ids == [*gpt2.tokenizer(PROMPT)["input_ids"], *one.token_ids]
