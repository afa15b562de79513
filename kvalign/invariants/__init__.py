"""Invariants of a streaming cache, measured: the same tokens, processed in another way.

    for outcome in kvalign.verify(model, lambda model: MyCache(...)):
        print(outcome.name, outcome.state, outcome.figure)

`verify` calls a cache only as transformers does, and looks at the entries that it gives to
attention. An invariant is one file and one line here, and the command finds it, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.names import Registry
from kvalign.foundation.settings import expect, typed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvalign.invariants.subject import Invariant, Make, Outcome

NUM_STEPS = 1000

INVARIANTS: Registry[Invariant] = Registry(
    "invariant",
    {
        "dense": "kvalign.invariants.feeding:dense",
        "rows": "kvalign.invariants.feeding:rows",
        "chunks": "kvalign.invariants.feeding:chunks",
        "evicting-chunks": "kvalign.invariants.feeding:evicting_chunks",
        "masks": "kvalign.invariants.entries:masks",
        "positions": "kvalign.invariants.entries:positions",
        "kept": "kvalign.invariants.entries:kept",
        "moves": "kvalign.invariants.entries:moves",
        "reorder": "kvalign.invariants.feeding:reorder",
        "repeat": "kvalign.invariants.feeding:repeat",
        "save": "kvalign.invariants.feeding:save",
        "undo": "kvalign.invariants.feeding:undo",
        "cut": "kvalign.invariants.feeding:cut",
        "put-back": "kvalign.invariants.feeding:put_back",
        "stored": "kvalign.invariants.remembered:stored",
        "recalled": "kvalign.invariants.remembered:recalled",
        "all-recalled": "kvalign.invariants.remembered:all_recalled",
        "half-entries": "kvalign.invariants.long_run:half_entries",
        "half-logits": "kvalign.invariants.long_run:half_logits",
        "kl": "kvalign.invariants.long_run:kl",
    },
)
"""Invariants by name, in the order of testing."""


@progress.shown_as("verify")
def verify(
    model: PreTrainedModel,
    make: Make,
    *,
    num_steps: int = NUM_STEPS,
    half: str = "bfloat16",
    invariants: Sequence[str] | None = None,
    seed: int = 0,
) -> list[Outcome]:
    """Test a cache and a model against the invariants.

    Args:
        model: a causal LM of transformers, in eval mode. It is not changed; comparisons of
            precision use copies.
        make: returns, for a model, an empty cache or a method of `kvalign.make_method`. It is
            called many times, once with the model in half precision.
        num_steps: tokens of the long stream after the cache is full.
        half: the precision to compare with float32: bfloat16 or float16.
        invariants: names of `INVARIANTS`; None: all.
        seed: of the random tokens.

    Returns:
        an outcome for each invariant. An exception of the cache is an outcome, too.

    Raises:
        UserError: an unknown invariant, or `make` returns no cache.
    """
    import torch

    from kvalign.invariants.stream import NotApplicableError
    from kvalign.invariants.subject import Outcome, Subject

    names = list(INVARIANTS) if invariants is None else list(invariants)
    by_name = {name: INVARIANTS.find(name) for name in names}
    if half not in ("bfloat16", "float16"):
        raise UserError(f"half must be bfloat16 or float16, got {half!r:.80}")
    if typed("num_steps", num_steps, int) < 1:
        raise UserError(f"num_steps must be at least 1, got {num_steps}")
    expect("make", make, Callable, "a function from a model to its cache")
    subject = Subject(model, make, num_steps, getattr(torch, half), typed("seed", seed, int))
    subject.stream()  # what is no cache is said before any work
    outcomes = []
    for name, invariant in by_name.items():
        progress.phase(name)
        outcome, look_at = partial(Outcome, name, invariant.about), invariant.look_at
        try:
            measured = invariant.measure(subject)
        except NotApplicableError as reason:
            outcomes.append(outcome("not applicable", note=str(reason)))
        except Exception as error:  # whatever somebody's cache raises
            note = f"it raised {type(error).__name__}: {error}"
            outcomes.append(outcome("failed", note=note, look_at=look_at))
        else:
            is_number = math.isfinite(measured.figure)
            note = measured.note if is_number else f"no number; {measured.note}".rstrip("; ")
            figures = (measured.figure if is_number else None, measured.bound, invariant.unit, note)
            ending = ("passed", *figures) if measured.holds else ("failed", *figures, look_at)
            outcomes.append(outcome(*ending))
    return outcomes
