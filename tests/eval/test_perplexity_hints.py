"""A perplexity that says the text is the wrong one is hinted at, once, and no other."""

import random

import pytest
from helpers.tiny_models import tiny_model

from kvalign.eval import perplexity
from kvalign.models.architectures import spec_of
from kvalign.models.loading import LoadedModel

pytestmark = pytest.mark.slow


def hints(caplog, **settings):
    caplog.clear()
    perplexity(**dict(cache_sizes=32, methods="recompute", num_tokens=300) | settings)
    return [record.getMessage() for record in caplog.records]


@pytest.fixture
def noise(tmp_path):
    """A text that no model has seen: letters by chance."""
    letters = random.Random(0)
    path = tmp_path / "noise.txt"
    path.write_text("".join(letters.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(3000)))
    return f"text:{path}"


def test_the_models_own_kind_of_text_says_nothing(loaded, caplog):
    methods = ("window", "recompute", "kvalign")  # `window` fails on any text
    assert hints(caplog, loaded=loaded, methods=methods) == []


@pytest.mark.parametrize("method", ["recompute", "kvalign"])
def test_far_above_the_card(loaded, noise, caplog, method):
    (hint,) = hints(caplog, loaded=loaded, corpus=noise, methods=(method, "window"))
    whose = "aligner table-kl" if method == "kvalign" else "gpt2-mini"
    assert f"of {method}" in hint and f"on the card of {whose}" in hint
    assert f"corpus {noise!r}" in hint and "may be the wrong text" in hint and "\n" not in hint


def test_guessing_among_the_vocabulary(loaded, caplog):
    model = tiny_model("gpt2", vocab_size=8192)
    random_one = LoadedModel(model, loaded.tokenizer, spec_of(model.config, "tiny"))
    (hint,) = hints(caplog, loaded=random_one)
    assert "about that of guessing among 8192 tokens" in hint
