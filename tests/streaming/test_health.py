"""Sick streams: logits that are no numbers end in one line that says where they come from."""

import pytest
import torch
from helpers.hostile_weights import number, one
from helpers.refusals import altered_model, refused, refuses

import kvalign
from kvalign import load_model, stream_tokens
from kvalign.aligners import Aligner
from kvalign.foundation.errors import RunError
from kvalign.methods import make_method

NAN = float("nan")


@pytest.fixture
def loaded():
    return load_model("recall-gpt2")


def sick(loaded, place="transformer.h.1.mlp.c_fc.weight", value=NAN):
    with torch.no_grad():
        loaded.model.get_parameter(place).view(-1)[0] = value
    return loaded


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("method", ["window", "streaming-llm", "kvalign", "recompute", "dense"])
def test_weights_of_the_model(method, do_sample, loaded):
    sick(loaded)
    stream = kvalign.stream(
        loaded.model, loaded.tokenizer, "a", method=method, do_sample=do_sample, cache_size=16
    )
    said = "this stream has ended: the weights of the model recall-gpt2: transformer.h.1.mlp"
    refuses(lambda: list(stream), said, RunError)
    refuses(lambda: stream.feed("b"), "cannot continue")


def test_weights_of_the_aligner(loaded):
    aligner = Aligner.from_pretrained("kvalign-recall-gpt2-table")
    aligner.key[0, 0, 5, 0] = NAN
    model, tokenizer = loaded.model, loaded.tokenizer
    stream = kvalign.stream(model, tokenizer, "a", cache_size=8, aligner=aligner, method="kvalign")
    said = "this stream has ended: the weights of the aligner kvalign-recall-gpt2-table: key"
    refuses(lambda: list(stream), said, RunError)


def test_precision(loaded):
    loaded.model.half()
    with torch.no_grad():
        loaded.model.transformer.ln_f.weight.fill_(60_000)
    stream = kvalign.stream(loaded.model, loaded.tokenizer, "a", method="window", cache_size=16)
    refuses(lambda: list(stream), "not finite in float16: give another precision", RunError)


def test_batches_and_plain_tokens(loaded):
    sick(loaded)
    model, tokenizer = loaded.model, loaded.tokenizer
    rows = kvalign.stream_batch(model, tokenizer, ["a", "b"], method="window", cache_size=16)
    refuses(lambda: list(rows), "this stream has ended: the weights of the model", RunError)
    tokens = stream_tokens(make_method("window", model, cache_size=16), torch.tensor([[5]]))
    refuses(lambda: next(tokens), "this stream has ended: the weights of the model", RunError)


def test_no_token_left(loaded):
    method = make_method("window", loaded.model, cache_size=16)
    ban = [lambda ids, scores: torch.full_like(scores, -torch.inf)]
    processors = lambda ids, scores: ban[0](ids, scores)  # noqa: E731
    tokens = stream_tokens(method, torch.tensor([[5]]), processors=processors, do_sample=True)
    refuses(lambda: next(tokens), "no token is left to choose", RunError)


SMALL = ["--methods", "window", "--cache-sizes", "16", "--model", "m"]
SCORES = {
    "perplexity": [*SMALL, "--num-tokens", "10"],
    "recall": [*SMALL, "--num-questions", "1"],
    "streameval": [*SMALL, "--num-lines", "4", "--query-every", "2", "--distances", "0"],
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name, tmp_path, monkeypatch, capfd):
    """A nan and a loss of which there is no perplexity are no figures."""
    monkeypatch.chdir(tmp_path)
    altered_model(tmp_path / "m", weights=one("transformer.ln_f.bias", number(NAN)))
    said = "window cannot be scored: the weights of the model m: transformer.ln_f.bias is not"
    refused(["eval", name, *SCORES[name]], said, capfd, code=1)
    if name == "perplexity":
        altered_model(tmp_path / "n", weights=lambda t: {n: x * 1e4 for n, x in t.items()})
        argv = ["eval", name, *SCORES[name], "--model", "n"]
        refused(argv, "are these the weights of a trained model?", capfd, code=1)
