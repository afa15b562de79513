"""Thousands of random streams against plain loops over models of transformers, which share no code
with the package: architectures, methods, sizes, policies, memories, precisions, pieces in which an
input comes, rows that join, leave and are saved, steps that fail.

In float32 logits of about 1 are those of float64 to 1e-5. In half precision they are at most four
times as far from float64 as the plain loop of the same precision gets on the same case: both round
at other places, so neither is the other's bound, but one that is wrong is further off by far.
Memories are compared in float32 alone: what is taken back is a choice that rounding turns.

KVALIGN_FUZZ_SEED repeats a run; it is printed with what was found.
"""

import os
import secrets
from collections import Counter

import pytest
import torch
from helpers.plain_memory import PlainMemory
from helpers.plain_stream import copy_of
from helpers.random_streams import RandomStream
from helpers.tiny_models import KINDS, tiny_model

from kvalign.models.attention import REGISTERED

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("KVALIGN_FUZZ_SEED") or secrets.randbelow(2**32))
CASES = 200  # of each architecture
found: Counter = Counter()
worst: dict[str, float] = {}  # in half precision as a share of what the plain loop is


@pytest.fixture(scope="module", autouse=True)
def reported():
    """In the end, what was found."""
    yield
    told = ", ".join(f"{num} {name}" for name, num in sorted(found.items()))
    furthest = ", ".join(f"{name} {far:.2g}" for name, far in sorted(worst.items()))
    print(f"\nnumerics, seed {SEED}: {told}\nfurthest from float64: {furthest}")


@pytest.fixture(scope="module")
def models():
    """Of a kind and a dtype: the model, its copies in float64, in half precision, for a memory."""
    made = {}

    def of(kind, dtype):
        if (kind, dtype) not in made:
            model = tiny_model(kind)
            has_memory = dtype == torch.float32 and kind in REGISTERED
            memory = PlainMemory.copy(model) if has_memory else None
            model = copy_of(model, dtype, model.config._attn_implementation)
            half = None if dtype == torch.float32 else copy_of(model, dtype)
            made[kind, dtype] = model, copy_of(model, torch.float64), half, memory
        return made[kind, dtype]

    return of


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_plain_loop(kind, models):
    wrong = []
    for number in range(CASES):
        case = RandomStream(kind, models, f"{SEED} {kind} {number}")
        try:
            case.run()
            case.check()
        except Exception as error:
            wrong.append(f"case {number}, {case}: {type(error).__name__}: {error}")
        found.update(case.found)
        of_loop, name = case.honest or 1.0, str(case.dtype).removeprefix("torch.")
        worst[name] = max(worst.get(name, 0.0), case.worst / of_loop)
    found["cases"] += CASES
    assert not wrong, "\n".join([f"seed {SEED}, {len(wrong)} of {CASES} cases:", *wrong])
