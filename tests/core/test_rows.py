"""Rows of a batch are independent: each is what it is alone, whatever its length, whoever comes and
goes beside it.
"""

import pytest
import torch
from helpers.methods import FIXED, make, tables
from helpers.tiny_models import KINDS, VOCAB

LENS = (1, 2, 5, 13, 21, 22, 40, 90)  # C is 20: a first input of C + 1, one more, and long ones
NUM_STEPS, LEAVE, JOIN = 44, 15, 28
CELLS = [
    (name, num_evicted)
    for name in ("window", "streaming-llm", "table", "network", "recompute", "discard-half")
    for num_evicted in ((None,) if name in FIXED else (1, 3))
]


def is_quick(kind, name, num_evicted):
    """Every architecture once, some with all that moves entries; the others say little more."""
    quick = kind == "llama" or (kind == "gpt2" and name in ("table", "network"))
    return quick or (name, num_evicted) == ("streaming-llm", 3)


MATRIX = [
    pytest.param(kind, *cell, marks=() if is_quick(kind, *cell) else pytest.mark.slow)
    for kind in KINDS
    for cell in CELLS
]


def new(name, model, num_evicted):
    if name == "table":
        return make("kvalign", model, num_evicted=num_evicted, aligner=tables(model, scale=0.5))
    return make("kvalign" if name == "network" else name, model, num_evicted=num_evicted)


@pytest.mark.parametrize(("kind", "name", "num_evicted"), MATRIX)
def test_rows_are_what_they_are_alone(kind, name, num_evicted, models):
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, VOCAB, (1, n), generator=rng) for n in LENS]
    answers = torch.randint(1, VOCAB, (len(LENS), NUM_STEPS), generator=rng)
    method = new(name, models[kind], num_evicted)
    alone = []
    for prompt, answer in zip(prompts, answers, strict=True):
        method.reset()
        logits = [method.feed(prompt)]
        logits += [method.feed(token.view(1, 1)) for token in answer]
        alone.append(torch.cat(logits))
    method.reset()
    methods = [method.new() for _ in prompts]
    for one, prompt, expected in zip(methods, prompts, alone, strict=True):
        assert torch.allclose(one.feed(prompt)[0], expected[0], atol=1e-4)
    batch, rows = methods[0], list(range(len(LENS)))
    batch.join(methods[1:])
    for i in range(NUM_STEPS):
        if i == LEAVE:  # some leave, the others change places
            kept = [6, 2, 0, 7, 1]
            batch.select(kept)
            rows = [rows[row] for row in kept]
        if i == JOIN:  # one comes late, from elsewhere
            late = batch.new()
            late.feed(prompts[3])
            for token in answers[3, :JOIN]:
                late.feed(token.view(1, 1))
            batch.join([late])
            rows.append(3)
        logits = batch.feed(answers[rows, i : i + 1])
        expected = torch.stack([alone[row][i + 1] for row in rows])
        assert torch.allclose(logits, expected, atol=1e-4), i
    assert method.fill == 0  # `new` shares nothing of the stream


@pytest.mark.parametrize(("name", "num_evicted"), CELLS)
def test_long_input_of_uneven_rows(name, num_evicted, models, ids):
    """It goes in one token at a time."""
    one, other, whole = (new(name, models["llama"], num_evicted) for _ in range(3))
    one.feed(ids[:1, :7])
    other.feed(ids[1:, :30])
    one.join([other])
    logits = one.feed(ids[:, 100:110])
    whole.feed(ids[1:, :30])
    for i in range(100, 110):
        expected = whole.feed(ids[1:, i : i + 1])
    assert torch.allclose(logits[1:], expected, atol=1e-4)


@pytest.mark.parametrize(("name", "num_evicted"), CELLS)
def test_uneven_rows_are_saved_and_go_on(name, num_evicted, models, ids):
    one, other = (new(name, models["gpt2"], num_evicted) for _ in range(2))
    one.feed(ids[:1, :7])
    other.feed(ids[1:, :30])
    one.join([other])
    one.feed(ids[:, 100:101])
    again = new(name, models["gpt2"], num_evicted)
    again.restore({key: x.clone() for key, x in one.state().items()})
    for i in range(101, 130):
        assert torch.equal(again.feed(ids[:, i : i + 1]), one.feed(ids[:, i : i + 1]))
