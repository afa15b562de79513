"""`kvalign verify`: a cache and a model are put to what every streaming cache must keep to."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvalign.app.sessions.method_settings import MethodSettings
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import DEFAULT_MODEL, NUM_SINKS, option
from kvalign.invariants import INVARIANTS, NUM_STEPS
from kvalign.methods import check_name

if TYPE_CHECKING:
    from kvalign.invariants import Make

OF_METHOD = (*(field.name for field in fields(MethodSettings)), "num_sinks")


@dataclass(frozen=True, kw_only=True)
class VerifySettings(MethodSettings):
    """Put a cache and a model to what every streaming cache must keep to.

    A row an invariant: passed, failed with what to look at, or not applicable with the reason; the
    figure that was measured and its bound. --cache tries any Cache of transformers: MODULE:NAME is
    code of yours, imported from here or from what is installed, and NAME(model) makes an empty
    cache. Exit code 1: something failed.

    Example:
        kvalign verify --model llama-mini --method streaming-llm --cache-size 32
    """

    model: str = option(DEFAULT_MODEL, help="shipped name, hub id or folder of a causal LM")
    device: str = option("cpu", help="cpu, cuda, mps, ...")
    cache_size: int = option(64, help="entries the cache keeps, sinks included", at_least=1)
    num_sinks: int | None = option(None, help=NUM_SINKS, at_least=0)
    cache: str | None = option(
        None, help="MODULE:NAME of what makes a cache for a model, in place of a method"
    )
    num_steps: int = option(
        NUM_STEPS, help="tokens of the long stream after the cache is full", at_least=1
    )
    half: str = option(
        "bfloat16",
        help="precision that is held against float32",
        choices=("bfloat16", "float16"),
    )
    invariants: tuple[str, ...] | None = option(
        None, help="those to try (default: all)", choices=tuple(INVARIANTS)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in OF_METHOD if name in self.changed()]
        if self.cache is not None and given:
            raise UserError(f"--cache makes the cache itself: leave out {', '.join(given)}")

    def make(self) -> Make:
        """What makes the cache or the method.

        Raises:
            UserError: an unknown method, or nothing of that name to import.
        """
        if self.cache is not None:
            from kvalign.app.cli.imported import imported

            return imported(self.cache)
        check_name(self.method)
        from kvalign.methods import make_method

        return lambda model: make_method(
            self.method,
            model,
            cache_size=self.cache_size,
            num_sinks=self.num_sinks,
            aligner=self.aligner,
            **self.sizes(),
        )


SETTINGS = VerifySettings


def run(settings: VerifySettings, as_json: bool) -> None:
    import dataclasses
    import json

    from kvalign.app.commands.verified import show
    from kvalign.invariants import verify
    from kvalign.models.loading import load_model

    make = settings.make()
    loaded = load_model(settings.model, settings.device)
    outcomes = verify(
        loaded.model,
        make,
        num_steps=settings.num_steps,
        half=settings.half,
        invariants=settings.invariants,
    )
    num_failed = sum(outcome.state == "failed" for outcome in outcomes)
    if as_json:
        rows = [dataclasses.asdict(outcome) for outcome in outcomes]
        print(json.dumps({"holds": not num_failed, "outcomes": rows}))
    else:
        show(outcomes)
    if num_failed:
        raise SystemExit(1)
