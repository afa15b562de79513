"""`kvalign verify`: test a cache and a model against the invariants of a streaming cache."""

from __future__ import annotations

import json
import pkgutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalign.app.sessions.stream_settings import MethodSettings
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import NUM_SINKS, ModelSettings, option
from kvalign.invariants import INVARIANTS, NUM_STEPS
from kvalign.methods.registry import check_name

if TYPE_CHECKING:
    from kvalign.invariants.subject import Make, Outcome

OF_METHOD = (*(field.name for field in fields(MethodSettings)), "num_sinks")


@dataclass(frozen=True, kw_only=True)
class VerifySettings(MethodSettings, ModelSettings):
    """Test a cache and a model against the invariants of a streaming cache.

    The table has a row for each invariant, with the measured figure and its bound. It passed,
    failed (with a hint) or does not apply (with the reason). --cache tests any Cache of
    transformers: MODULE:NAME is your own code, imported from this folder or from an installed
    package, and NAME(model) makes an empty cache. Exit code 1: something failed.

    Example:
        kvalign verify --model llama-mini --method streaming-llm --cache-size 32
    """

    cache_size: int = option(64, help="entries the cache keeps, sinks included", at_least=1)
    num_sinks: int | None = option(None, help=NUM_SINKS, at_least=0)
    cache: str | None = option(
        None, help="MODULE:NAME of a function that makes a cache for a model, instead of a method"
    )
    num_steps: int = option(NUM_STEPS, help="tokens after the cache is full", at_least=1)
    half: str = option("bfloat16", help="compared with float32", choices=("bfloat16", "float16"))
    invariants: tuple[str, ...] | None = option(
        None, help="invariants to test (default: all)", choices=tuple(INVARIANTS)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        flags = [name for name in OF_METHOD if name in self.changed()]
        if self.cache is not None and flags:
            raise UserError(f"--cache makes the cache itself: leave out {', '.join(flags)}")

    def make(self) -> Make:
        if self.cache is not None:
            return _import_member(self.cache)
        check_name(self.method)
        from kvalign.methods import make_method

        sizes = dict(cache_size=self.cache_size, num_sinks=self.num_sinks, **self.sizes())
        return partial(make_method, self.method, aligner=self.aligner, **sizes)


def verify(settings: VerifySettings, as_json: bool) -> None:
    from kvalign import invariants
    from kvalign.models.loading import load_model

    make = settings.make()
    outcomes = invariants.verify(
        load_model(settings.model, settings.device, weights=settings.weights).model,
        make,
        num_steps=settings.num_steps,
        half=settings.half,
        invariants=settings.invariants,
    )
    holds = all(outcome.state != "failed" for outcome in outcomes)
    if as_json:
        print(json.dumps({"holds": holds, "outcomes": list(map(asdict, outcomes))}))
    else:
        show(outcomes)
    if not holds:
        raise SystemExit(1)


def show(outcomes: Sequence[Outcome]) -> None:
    """Print a row for each invariant, hints for those that failed, and a summary line."""
    from kvalign.foundation.console import Heading, print_table

    print_table(
        ["invariant", "", Heading("figure", True), Heading("bound", True), "of", "note"],
        [[x.name, x.state, _text(x.figure), _text(x.bound), x.unit, x.note] for x in outcomes],
    )
    if failed := [[x.name, x.about, x.look_at] for x in outcomes if x.state == "failed"]:
        print()
        print_table(["failed", "what must hold", "what to look at"], failed)
    counts = Counter(outcome.state for outcome in outcomes)
    print("\n" + ", ".join(f"{num} {state}" for state, num in counts.items()))


def _text(number: float | None) -> str:
    """`2.1e-06`, `0.31`, `512`, or nothing."""
    if number is None:
        return ""
    return f"{number:.0f}" if float(number).is_integer() else f"{number:.2g}"


def _import_member(name: str) -> Any:
    """Return what `MODULE:NAME` names, of installed modules and of the folder of the command."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        function = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"--cache {name}: {error}") from error
    if not callable(function):
        raise UserError(
            f"--cache {name} must be callable with a model, got {type(function).__name__}"
        )
    return function
