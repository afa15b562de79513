"""Wrong use of the Python API: one sentence that says what came and what was needed."""

import numpy as np
import pytest
import torch

import kvalign
from kvalign import load_model, make_method, stream_generate, stream_tokens
from kvalign.eval.evaluations.perplexity import PerplexitySettings

PROMPT = torch.tensor([[5, 6, 7]])


def generate(loaded, **wrong):
    """`model.generate` as a user calls it."""
    sizes = {"custom_generate": stream_generate, "cache_size": 16, "max_new_tokens": 2}
    return loaded.model.generate(PROMPT, **(sizes | wrong))


CALLS = [
    (lambda m: next(stream_tokens(method_of(m), PROMPT[:, :0])), "the prompt is empty"),
    (lambda m: generate(m, stop_strings=["in"]), "need the model's tokenizer: give tokenizer="),
    (lambda m: kvalign.training.import_published(model="gpt2-mini"), r"published\(\) needs \w+="),
    (lambda m: kvalign.stream("gpt2-mini", m.tokenizer, "It"), "transformers, got str"),
    (lambda m: load_model("gpt2-mini", dtype="int8"), "dtype must be one of .* got 'int8'"),
    (lambda m: next(stream_tokens("window", PROMPT)), "method must be one of kvalign.make_method"),
    (lambda m: kvalign.score(method_of(m), PROMPT), r"at least cache_size \+ 2 = 10 a row, got 3"),
]
LOADED = r"load_stream\(\) takes no cache_size: the saved stream keeps its own"
NEAREST = r"did you mean kvalign-gpt2-mini-table\? \(shipped: kvalign-gpt2-mini-table, kvalign-gpt2"
CALLS += [
    (lambda m: kvalign.load_stream("talk", m.model, m.tokenizer, cache_size=64), LOADED),
    (lambda m: make_method("kvalign", m.model, aligner="kvalign-gpt2-mini-tabel"), NEAREST),
    (lambda m: of_a_cache(m.model, num=18), r"at most cache_size \+ 1 = 17 tokens at once, got 18"),
]
STREAMS = [
    (dict(max_tokens=5), r"stream\(\) has no keyword 'max_tokens': did you mean max_new_tokens\?"),
    (dict(method=3), "method must be one of auto, dense, .* got 3"),
    (dict(cache_size="64"), "cache_size must be a whole number, got '64'"),
    (dict(prompt=["It", "was"]), "input must be text or a list of token ids, got list"),
    (dict(prompt=[{"role": "user", "content": "Hi"}]), "tokenizer.apply_chat_template"),
    (dict(prompt=PROMPT), r"got Tensor .* ids\[0\].tolist\(\)"),
    (dict(prompt=[10**6]), "token ids must be below .* for this model, got 1000000"),
]
CALLS += [
    (lambda m, wrong=wrong: kvalign.stream(m.model, m.tokenizer, **wrong), message)
    for wrong, message in STREAMS
]
IDS = [
    (torch.tensor([5, 6]), r"a tensor \[rows, tokens\] of int64, got torch.int64 \[2\]"),
    (torch.tensor([[5, 2**40]]), "token ids must be below 8192 for this model, got 5 to 1099511"),
]
CALLS += [
    (lambda m, name=name, ids=ids: method_of(m, name).feed(ids), message)
    for ids, message in IDS
    for name in ("window", "recompute")
]


def of_a_cache(model, num):
    return model(torch.arange(num)[None], past_key_values=kvalign.make_cache(model, cache_size=16))


def method_of(loaded, name="window"):
    return make_method(name, loaded.model, cache_size=8, warn=False)


def test_numbers_of_numpy_are_numbers(loaded):
    settings = PerplexitySettings(num_tokens=np.int64(3), cache_sizes=[np.int64(16), 32])
    assert settings.num_tokens == 3 and settings.cache_sizes == (16, 32)
    assert method_of(loaded).feed(PROMPT.int()).shape == (1, 8192)


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message[:40] for _, message in CALLS])
def test_wrong_calls_are_one_sentence(call, message, loaded, offline):
    wrong = (ValueError, TypeError, FileNotFoundError, AttributeError)
    with pytest.raises(wrong, match=message) as caught:
        call(loaded)
    assert "\n" not in str(caught.value)
