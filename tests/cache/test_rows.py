"""Rows of a batch are independent: each is what it is alone, whatever its length, whoever comes and
goes beside it.
"""

import pytest
import torch
from helpers.comings import come_and_go
from helpers.methods import FIXED, make, tables
from helpers.pairwise import covering
from helpers.tiny_models import KINDS

from kvalign.models.architectures import FAMILIES

LENS = (1, 2, 5, 13, 21, 22, 40, 70)  # C is 20: a first input of C + 1, one more, and long ones
NUM_STEPS, LEAVE, JOIN = 32, 10, 22
CELLS = [
    (name, num_evicted)
    for name in ("window", "streaming-llm", "table", "network", "recompute", "discard-half")
    for num_evicted in ((None,) if name in FIXED else (1, 3))
]


MATRIX = covering(
    ((kind, *cell) for kind in KINDS for cell in CELLS),
    lambda kind, *cell: (FAMILIES[kind], *cell),
    lambda kind, *_: kind,
)


def is_telling(kind, name, num_evicted):
    """All of one family, and those of another that move entries; the invariants hold rows
    of the others.
    """
    family = FAMILIES[kind]
    return family == "rotary" or (family == "learned" and name in ("table", "network"))


def new(name, model, num_evicted):
    if name == "table":
        return make("kvalign", model, num_evicted=num_evicted, aligner=tables(model, scale=0.5))
    return make("kvalign" if name == "network" else name, model, num_evicted=num_evicted)


@pytest.mark.parametrize(("kind", "name", "num_evicted"), [x for x in MATRIX if is_telling(*x)])
def test_rows_are_what_they_are_alone(kind, name, num_evicted, models):
    method = new(name, models[kind], num_evicted)
    come_and_go(method, LENS, [6, 2, 0, 7, 1], num_steps=NUM_STEPS, leave=LEAVE, join=JOIN)
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
