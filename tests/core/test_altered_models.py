"""Compiled and quantised models stream like any other: nothing of the cache is in the model."""

import itertools

import pytest
import torch
from helpers.methods import CACHE_SIZE, STREAMING, make

import kvalign


def greedy(method, ids, count):
    return torch.stack(list(itertools.islice(kvalign.stream_tokens(method, ids), count)), 1)


def test_compiled_model_writes_the_same_tokens(models, ids):
    """Without generated code, which would take a C++ compiler; traced twice, then as it is."""
    torch.compiler.reset()
    expected = greedy(make("kvalign", models["gpt2"]), ids[:, :9], 30)
    with torch._dynamo.config.patch(recompile_limit=2):
        method = make("kvalign", torch.compile(models["gpt2"], backend="eager"))
        assert torch.equal(greedy(method, ids[:, :9], 30), expected)
    torch.compiler.reset()


@pytest.mark.parametrize("name", STREAMING)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_model_streams(name, models, ids):
    """Until the first eviction with the tokens of its plain, growing cache; then without end.

    Re-encoding a window rounds activations by the scale of the window, not of one token.
    """
    quantised = torch.ao.quantization.quantize_dynamic(models["llama"], {torch.nn.Linear})
    assert sum(".quantized." in type(module).__module__ for module in quantised.modules()) > 5
    expected = greedy(make("dense", quantised), ids[:, :9], CACHE_SIZE - 9)
    found = greedy(make(name, quantised), ids[:, :9], 100)
    assert found.shape == (2, 100)
    if name != "recompute":
        assert torch.equal(found[:, : CACHE_SIZE - 9], expected)
