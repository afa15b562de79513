"""Streams within `torch.inference_mode`, outside, and across its border, and loops that leave out
`torch.no_grad`.
"""

import itertools
from contextlib import nullcontext

import pytest
import torch
from helpers.methods import WAYS, made
from helpers.tiny_models import tiny_model

import kvalign

WITHIN, OUTSIDE = torch.inference_mode, nullcontext
BORDERS = {"within": (WITHIN,), "in and out": (WITHIN, OUTSIDE), "out and in": (OUTSIDE, WITHIN)}
FAST = [
    ("tables", "llama", dict(memory=30)),
    ("streaming-llm", "llama", dict(policy="h2o")),
    ("tables", "gpt2", dict(policy="key-norm")),
    ("tables", "opt", {}),
    ("discard-half", "gpt2", {}),
]
CASES = [(*way, "in and out") for way in FAST]
CASES += [
    pytest.param(*way, border, marks=pytest.mark.slow)
    for way, border in zip([*FAST, *WAYS], itertools.cycle(BORDERS), strict=False)
]


def fed(new, ids, modes):
    """Logits of a method that is made in one mode, fed in the next ones, whose rows are taken apart
    and put together in between.
    """
    logits = []
    with modes[0]():
        method = new()
    first = ids[:, :30] if method.tokens_left is None else ids[:, :4]
    for i, part in enumerate([first, *ids[:, 30:60].split(1, 1)]):
        with modes[i % len(modes)]():
            logits.append(method.feed(part).clone())
            if i in (20, 21) and type(method).join is not kvalign.methods.base.Method.join:
                other = method.new()
                other.feed(first[1:])
                method.select([0])
                method.join([other])
    return torch.stack(logits)


@pytest.mark.parametrize(("name", "kind", "sizes", "border"), CASES)
def test_inference_mode_and_its_border(name, kind, sizes, border, models, ids):
    def new():
        return made(name, models[kind], **sizes)

    found = fed(new, ids, BORDERS[border])
    assert torch.equal(found, fed(new, ids, (torch.no_grad,)))


def nodes_of(x):
    """How many operations a tensor has come from."""
    seen, found = set(), [x.grad_fn]
    while found:
        node = found.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += [before for before, _ in node.next_functions]
    return len(seen)


LOOPS = [*FAST[:4], ("streaming-llm", "gpt_neox", {}), ("tables", "gpt_neo", {})]
LOOPS += [("kvalign", "llama", {}), ("streaming-llm", "bloom", {}), ("kvalign", "gpt2", {})]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "sizes"), LOOPS)
def test_a_loop_without_no_grad_does_not_grow(name, kind, sizes, ids):
    """A step comes from as many operations at the end as it did when the cache was full."""
    model = tiny_model(kind).requires_grad_(True)
    cache = made(name, model, **sizes).cache
    counts = []
    for i in range(45):
        with WITHIN() if i < 5 else OUTSIDE():
            out = model(input_ids=ids[:, i : i + 1], past_key_values=cache)
        if i in (25, 35, 44):
            counts.append(nodes_of(out.logits))
    assert counts[0] > 0 and len(set(counts)) == 1
    assert not any(x.requires_grad for x in cache.state().values())


SLOPES = [
    ("tables", "gpt2", {}),
    ("tables", "llama", {}),
    ("tables", "gpt2", dict(memory=8, num_recalled=8)),
]
SLOPES += [("streaming-llm", "llama", sizes) for sizes in (dict(memory=30), dict(policy="h2o"))]


@pytest.mark.parametrize(("name", "kind", "sizes"), SLOPES)
def test_backward_of_a_step_is_its_slope(name, kind, sizes, ids):
    """In the weights of a query: entries that a cache stores are constants."""
    of_three = {"gpt2": dict(n_layer=3), "llama": dict(num_hidden_layers=3)}
    model = tiny_model(kind, **of_three[kind]).requires_grad_(True)
    layers = {"gpt2": "transformer.h.2.attn.c_attn", "llama": "model.layers.2.self_attn.q_proj"}
    weight = model.get_submodule(layers[kind]).weight
    way = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    way = torch.nn.functional.pad(way, (0, weight.shape[1] - 32))  # of gpt2's queries, alone

    def step(shift):
        cache = made(name, model, **sizes).cache
        with torch.no_grad():
            for i in range(30):
                model(ids[:, i : i + 1], past_key_values=cache)
            weight.add_(way, alpha=shift)
        logits = model(ids[:, 30:31], past_key_values=cache).logits
        loss = logits[0, -1, :20].square().sum()
        loss.backward()
        with torch.no_grad():
            weight.sub_(way, alpha=shift)
        return loss.item()

    step(0)
    slope = (weight.grad * way).sum().item()
    assert (step(0.01) - step(-0.01)) / 0.02 == pytest.approx(slope, rel=0.02)
