"""Processes whose default dtype is not float32: what is computed does not depend on it."""

import pytest
import torch
from helpers.methods import step, tables

import kvalign

WAYS = {
    "table": {},
    "int8": dict(cache_dtype="int8"),
    "memory": dict(memory=30),
    **{name: dict(policy=name) for name in ("h2o", "random", "second-chance")},
}


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def other_default(request):
    """A way to change the default dtype of this process, which is float32 again afterwards."""
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("kind", "way"), [*(("gpt2", way) for way in WAYS), ("llama", "table")])
def test_streams_and_losses(kind, way, models, ids, other_default):
    model = models[kind]

    def found():
        method = kvalign.make_method(
            "kvalign", model, cache_size=20, aligner=tables(model, 0.3), **WAYS[way]
        )
        return step(method, ids[:1, :45], 30), kvalign.score(method, ids[:1, :45])

    expected = found()
    other_default()
    assert all(map(torch.equal, found(), expected))
