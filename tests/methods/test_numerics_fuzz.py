"""Hundreds of random streams against plain loops over models of transformers, which share no code
with the package: architectures, methods, sizes, policies, memories, precisions, pieces in which an
input comes, rows that join, leave and are saved, steps that fail.

In float32 logits of about 1 are those of float64 to 1e-5. In half precision they are at most four
times as far from float64 as the plain loop of the same precision gets on the same case: both round
at other places, so neither is the other's bound, but one that is wrong is further off by far.
What a policy evicts and a memory takes back is a choice that rounding turns: loops follow it, and
judge it by scores that may be as far off.

KVALIGN_FUZZ_SEED repeats a run; it is printed with what was found. KVALIGN_FUZZ_CASES makes it
longer.
"""

import functools
import os
import secrets
from collections import Counter

import pytest
import torch
from helpers.plain_memory import PlainMemory
from helpers.plain_stream import copy_of
from helpers.random_streams import MORE, RandomStream
from helpers.tiny_models import KINDS, tiny_model

from kvalign.models.architectures import REGISTERED

SEED = int(os.environ.get("KVALIGN_FUZZ_SEED") or secrets.randbelow(2**32))
FEW = 3  # of each architecture, others each time
CASES = int(os.environ.get("KVALIGN_FUZZ_CASES") or 12)  # with those of the long set
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
    """Of a kind, a dtype and an attention: the model, its copies in float64, in half precision, and
    both with a memory.
    """

    @functools.cache
    def of(name, dtype, attention):
        kind, changes = MORE.get(name, (name, {}))
        model = tiny_model(kind, **changes)
        for parameter, x in model.named_parameters():
            if changes and parameter.endswith("proj.bias"):
                x.normal_(generator=torch.Generator().manual_seed(0))
        attention = attention if model._supports_sdpa else "eager"
        model, dtypes = copy_of(model, dtype, attention), [torch.float64]
        dtypes += [dtype] * (dtype != torch.float32)
        exact, *half = (
            copy_of(model, x, "eager" if kind in REGISTERED else attention) for x in dtypes
        )
        memories = [PlainMemory.copy(model, x) for x in dtypes] if kind in REGISTERED else []
        return model, exact, half[0] if half else None, memories

    return of


@pytest.mark.parametrize("kind", [*KINDS, *MORE])
@pytest.mark.parametrize(
    "numbers", [range(FEW), pytest.param(range(FEW, CASES), marks=pytest.mark.slow)], ids=str
)
def test_it_is_the_plain_loop(numbers, kind, models, monkeypatch):
    wrong = []
    for number in numbers:
        # A half of segments, and of frames, is short; and of memories, which turn then.
        monkeypatch.setattr("kvalign.cache.segments.SEGMENT_LEN", (7, 512)[number % 2])
        for name in ("cache.segments", "memory.memory"):
            monkeypatch.setattr(f"kvalign.{name}.PART_LEN", (7, 128)[number % 2])
        monkeypatch.setattr("kvalign.cache.realigner.LONG_RUN", (1, 256)[number // 2 % 2])
        case = RandomStream(kind, models, f"{SEED} {kind} {number}")
        try:
            case.run()
            case.check()
        except Exception as error:
            wrong.append(f"case {number}, {case}: {type(error).__name__}: {error}")
        found.update(case.found)
        of_loop, name = case.honest or 1.0, str(case.dtype).removeprefix("torch.")
        worst[name] = max(worst.get(name, 0.0), case.worst / of_loop)
    found["cases"] += len(numbers)
    assert not wrong, "\n".join([f"seed {SEED}, {len(wrong)} of {len(numbers)} cases:", *wrong])
