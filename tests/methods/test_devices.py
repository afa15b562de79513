"""A model on another device than the CPU: every method gives what it gives on the CPU, and nothing
mixes tensors of the two.
"""

import copy

import pytest
import torch
from helpers.methods import anchored, make, tables
from helpers.other_device import NAME, moved
from helpers.pairwise import of_each_family

from kvalign.methods import METHODS
from kvalign.policies import POLICIES

WAYS = [(name, kind, {}) for name, kind in of_each_family((*METHODS, "tables", "anchored"))]
WAYS += [("streaming-llm", "llama", dict(policy=name)) for name in POLICIES]
WAYS += [
    ("streaming-llm", "llama", dict(cache_dtype="int8")),
    ("streaming-llm", "llama", dict(memory=30)),
    ("streaming-llm", "llama", dict(memory=30, cache_dtype="int8")),
    ("tables", "gpt2", dict(memory=30)),
    ("tables", "gpt2", dict(memory=30, recall_places="age")),
    ("tables", "llama", dict(memory=30)),
]


def made(name, model, **sizes):
    aligners = {"tables": tables, "anchored": anchored}
    if name not in aligners:
        return make(name, model, **sizes)
    return make("kvalign", model, aligner=aligners[name](model, 0.5), **sizes)


@pytest.mark.parametrize(("name", "kind", "sizes"), WAYS)
def test_it_gives_the_same(name, kind, sizes, models, ids):
    one = made(name, models[kind], **sizes)
    model = moved(copy.deepcopy(models[kind]))
    assert model.device.type == NAME
    other = made(name, model, **sizes)
    for start, end in ((0, 30), (30, 31), (31, 32), (32, 45), (45, 46)):
        expected = one.feed(ids[:, start:end])
        found = other.feed(ids[:, start:end].to(NAME))
        assert found.device.type == NAME
        assert torch.allclose(found.cpu(), expected, atol=1e-5)
