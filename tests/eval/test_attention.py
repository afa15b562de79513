"""What queries look at, against transformers' own `output_attentions`."""

import pytest
import torch
from helpers.methods import STREAMING, make, step, tables
from helpers.tiny_models import tiny_model

from kvalign.eval.evaluations.attention import in_bins, num_tokens, readable, watch, watched
from kvalign.methods import make_method

SIZE, STEPS = 30, 2


def eager(kind, **changes):
    """A tiny model that computes all weights itself."""
    model = tiny_model(kind, **changes)
    model.config._attn_implementation = "eager"
    return model


def own_weights(model, ids):
    """transformers' weights [B, L, H, S] of the last of ids [B, S]."""
    found = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
    return torch.stack([layer[:, :, -1] for layer in found], 1)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bloom"])
def test_before_an_eviction_they_are_those_of_the_model(kind, ids):
    ids = ids[:, : num_tokens(SIZE, STEPS)]
    windows = [ids[:, : SIZE + 1 - number] for number in (1, 0)]
    expected = sum(in_bins(own_weights(eager(kind), window)) for window in windows) / 2
    for name in STREAMING:
        method = make(name, tiny_model(kind), cache_size=SIZE)
        before, _ = watch(method, ids, STEPS)
        torch.testing.assert_close(before, expected, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bloom"])
def test_after_it_recompute_looks_at_its_window_as_the_model_does(kind, ids):
    ids = ids[:, : num_tokens(SIZE, STEPS)]
    _, after = watch(make("recompute", tiny_model(kind), cache_size=SIZE), ids, STEPS)
    ends = (ids.shape[1] - 1, ids.shape[1])
    windows = [ids[:, end - SIZE - 1 : end] for end in ends]
    expected = sum(in_bins(own_weights(eager(kind), window)) for window in windows) / 2
    torch.testing.assert_close(after, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_what_is_placed_on_read_is_placed_before_for_the_same_logits(kind, ids):
    model = tiny_model(kind)
    methods = [
        make_method("kvalign", model, cache_size=SIZE, aligner=tables(model, 0.5)) for _ in range(2)
    ]
    with watched(model) as found:
        logits = step(readable(methods[0]), ids[:, :60], SIZE + 1)
    assert len(found) == (60 - SIZE) * model.config.num_hidden_layers
    assert all(torch.allclose(one.sum(-1), torch.ones(())) for one in found)
    torch.testing.assert_close(logits, step(methods[1], ids[:, :60], SIZE + 1), atol=1e-3, rtol=0)
