"""Compiled and quantised models stream like any other."""

import itertools

import pytest
import torch
from helpers.methods import CACHE_SIZE, STREAMING, make, tables
from helpers.pairwise import of_each_family
from torch._dynamo.utils import counters

import kvalign


def greedy(method, ids, count):
    return torch.stack(list(itertools.islice(kvalign.stream_tokens(method, ids), count)), 1)


def test_compiled_model_writes_the_same_tokens(models, ids):
    """Without generated code, which would take a C++ compiler."""
    torch.compiler.reset()
    expected = greedy(make("kvalign", models["gpt2"]), ids[:, :9], 30)
    method = make("kvalign", torch.compile(models["gpt2"], backend="eager"))
    assert torch.equal(greedy(method, ids[:, :9], 30), expected)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    torch.compiler.reset()


FAST = [("tables", "gpt2"), ("streaming-llm", "llama")]
NAMES = ("window", "streaming-llm", "tables", "kvalign", "discard-half")
OTHERS = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in of_each_family(NAMES)
    if case not in FAST
]


@pytest.mark.parametrize(("name", "kind"), FAST + OTHERS)
def test_a_full_cache_is_compiled_once(name, kind, models, ids):
    """Two graphs, the second for any place in the buffer; then neither a new graph nor a break,
    across copies to the buffer's front and turns of all keys, two of each and more.
    """
    torch.compiler.reset()
    counters.clear()
    model = models[kind]
    extra = {"aligner": tables(model, scale=0.5)} if name == "tables" else {}
    name = "kvalign" if name == "tables" else name
    plain, compiled = (make(name, model, **extra) for _ in range(2))
    compiled.compile(backend="eager")
    for method in (plain, compiled):
        method.feed(ids[:, : CACHE_SIZE + 1])
    for i in range(CACHE_SIZE + 1, ids.shape[1]):
        token = ids[:, i : i + 1]
        found = compiled.feed(token)
        if i == CACHE_SIZE + 20:
            first = dict(counters["stats"])
        assert torch.allclose(found, plain.feed(token), atol=1e-5)
    assert first["unique_graphs"] == counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
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
