"""The generation loop, and transformers' own `generate` through it."""

import itertools
from unittest.mock import Mock

import pytest
import torch
from helpers.doc_pages import ROOT
from helpers.methods import STREAMING, make
from helpers.pairwise import one_of_each
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor

import kvalign

STREAMED = dict(custom_generate=kvalign.stream_generate, method="streaming-llm", cache_size=20)
STREAMED |= dict(do_sample=False, eos_token_id=None)


def take(tokens, count):
    return torch.stack(list(itertools.islice(tokens, count)), 1)


def test_ended_rows_are_padded_and_the_last_end_stops(models, ids):
    method = make("streaming-llm", models["gpt2"])
    free = take(kvalign.stream_tokens(method, ids[:, :9]), 30)
    end = free[0, 4].item()
    first = [(row == end).int().argmax().item() if (row == end).any() else 30 for row in free]
    tokens = kvalign.stream_tokens(method, ids[:, :9], eos_token_ids=[end], pad_token_id=95)
    ended = take(tokens, 30)
    assert ended.shape[1] == min(30, max(first) + 1)
    for row, stop, expected in zip(ended, first, free, strict=True):
        stop = min(stop, ended.shape[1] - 1)
        assert torch.equal(row[: stop + 1], expected[: stop + 1])
        assert (row[stop + 1 :] == 95).all()


def test_ended_rows_are_padded_as_by_transformers(models, ids):
    """Without a token to pad with, by the first of several that end."""
    how = dict(do_sample=False, max_new_tokens=12, pad_token_id=None)
    end = int(models["gpt2"].generate(ids[:2, :9], **how, eos_token_id=None)[0, 13])
    how |= dict(eos_token_id=[end, 0])
    theirs = models["gpt2"].generate(ids[:2, :9], **how)
    ours = models["gpt2"].generate(ids[:2, :9], **STREAMED | how | dict(cache_size=30))
    assert torch.equal(ours, theirs) and end > 0 and (theirs[0, 14:] == end).all()


@pytest.mark.parametrize("name", STREAMING)
def test_two_parts_of_a_stream_are_one(name, models, ids):
    """The second part begins with the token that was not fed; processors see both."""
    method = make(name, models["gpt2"])
    processors = LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])
    whole = take(kvalign.stream_tokens(method, ids[:1, :9], processors=processors), 60)
    first = take(kvalign.stream_tokens(method, ids[:1, :9], processors=processors), 25)
    fed = torch.cat([ids[:1, :9], first[:, :-1]], 1)
    rest = kvalign.stream_tokens(method, first[:, -1:], processors=processors, before=fed)
    assert torch.equal(torch.cat([first, take(rest, 35)], 1), whole)


@pytest.mark.parametrize(
    ("kind", "name"), one_of_each(("gpt2", "llama", "bloom"), ["streamer", "stream_to"])
)
def test_generate_of_transformers_streams(kind, name, models, ids):
    model, streamer = models[kind], Mock()
    sizes = dict(num_sinks=2, num_evicted=3)
    out = model.generate(ids[:, :30], **STREAMED, max_new_tokens=90, **{name: streamer}, **sizes)
    method = make("streaming-llm", model, **sizes)
    assert torch.equal(out[:, 30:], take(kvalign.stream_tokens(method, ids[:, :30]), 90))
    assert torch.equal(out[:, :30], ids[:, :30])
    first, *others = (call.args[0] for call in streamer.put.call_args_list)
    assert streamer.end.called and torch.equal(torch.stack(others, 1), out[:, 30:])
    assert torch.equal(first, ids[:, :30])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bloom"])
def test_generate_takes_prompts_of_unequal_lengths(kind, models, ids):
    """Padded on the left: each row is as if it were alone, and padding is no token."""
    model = models[kind]
    mask = torch.ones_like(ids[:, :30])
    mask[0, :18] = 0
    out = model.generate(ids[:, :30], attention_mask=mask, max_new_tokens=60, **STREAMED)
    method = make("streaming-llm", model)
    for row, prompt in enumerate((ids[:1, 18:30], ids[1:, :30])):
        alone = take(kvalign.stream_tokens(method, prompt), 60)
        assert torch.equal(out[row, 30:], alone[0])


@pytest.mark.parametrize("directly", [False, True])
def test_generate_ends_at_stop_strings(directly, loaded):
    ids = loaded.tokenizer("The history of the island", return_tensors="pt")["input_ids"]
    sizes = dict(cache_size=16, max_new_tokens=60, do_sample=False)
    how = dict(stop_strings=[" the"], tokenizer=loaded.tokenizer)

    def text(**more):
        out = loaded.model.generate(ids, custom_generate=kvalign.stream_generate, **sizes, **more)
        return loaded.tokenizer.decode(out[0, ids.shape[1] :])

    stopped = text(**how)
    if directly:
        new = kvalign.stream_generate(loaded.model, ids, **sizes, **how)
        stopped = loaded.tokenizer.decode(new[0, ids.shape[1] :])
    whole = text()
    assert whole.startswith(stopped) and len(stopped) < len(whole)
    assert " the" in stopped and " the" not in stopped[:-4]


def test_the_repository_of_hub_is_stream_generate(models, tmp_path, monkeypatch):
    """Loaded from its folder as transformers loads it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    model, ids = models["llama"], torch.arange(1, 9)[None]
    settings = dict(cache_size=12, max_new_tokens=30, do_sample=False)
    folder = str(ROOT / "hub" / "kvalign-generate")
    found = model.generate(ids, custom_generate=folder, trust_remote_code=True, **settings)
    wanted = model.generate(ids, custom_generate=kvalign.stream_generate, **settings)
    assert found.shape == (1, 38) and torch.equal(found, wanted)
