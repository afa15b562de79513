"""A perplexity that says the text is the wrong one is hinted at, and no other."""

import pytest
from helpers.tiny_models import tiny_model

from kvalign.eval import perplexity
from kvalign.models.architectures import spec_of
from kvalign.models.loading import LoadedModel

pytestmark = pytest.mark.slow


def hints(caplog, **settings):
    caplog.clear()
    perplexity(**dict(cache_sizes=32, num_tokens=300) | settings)
    return [record.getMessage() for record in caplog.records]


def test_guessing_among_the_vocabulary(loaded, caplog):
    methods = ("window", "recompute", "kvalign")  # `window` fails on any text
    assert hints(caplog, loaded=loaded, methods=methods) == []
    model = tiny_model("gpt2", vocab_size=8192)
    random_one = LoadedModel(model, loaded.tokenizer, spec_of(model.config, "tiny"))
    (hint,) = hints(caplog, loaded=random_one, methods="recompute")
    assert "about that of guessing among 8192 tokens: corpus 'python-docs'" in hint
