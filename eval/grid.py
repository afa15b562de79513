"""The model of a comparison, and its methods: every one asked for, at every size."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from transformers import PreTrainedModel

from kvalign import progress
from kvalign.aligners import Aligner
from kvalign.eval.evaluation import Row
from kvalign.eval.settings import ComparisonSettings
from kvalign.methods import METHODS, make_method
from kvalign.methods.base import Method
from kvalign.models import LoadedModel, load_model

S = TypeVar("S", bound=ComparisonSettings)


def load(settings: S, loaded: LoadedModel | None) -> tuple[S, LoadedModel]:
    """The settings and the model that they name; or one that is loaded already, and the settings
    that name it.
    """
    if loaded is None:
        return settings, load_model(settings.model, settings.device, settings.dtype)
    model = loaded.model
    dtype = str(model.dtype).removeprefix("torch.")
    named: dict[str, Any] = dict(model=loaded.spec.name, device=str(model.device), dtype=dtype)
    return dataclasses.replace(settings, **named), loaded


def make_grid(
    settings: ComparisonSettings,
    model: PreTrainedModel,
    aligners: Sequence[Aligner | str] | None = None,
) -> list[Method]:
    """Methods at every cache size and number evicted; of `kvalign` one for each aligner, those
    given in place of those that the settings name.

    Raises:
        UserError: as `kvalign.make_method`.
    """
    methods = [
        make_method(
            name,
            model,
            cache_size=cache_size,
            num_sinks=settings.num_sinks,
            num_evicted=num_evicted,
            realign_every=realign_every,
            aligner=aligner,
        )
        for cache_size in settings.cache_sizes
        for num_evicted in settings.num_evicted or (None,)
        for name in settings.methods
        for aligner in (
            (aligners or settings.aligner or (None,)) if METHODS[name].takes_aligner else (None,)
        )
        for realign_every in (settings.realign_every if METHODS[name].takes_aligner else (None,))
    ]
    # `discard-half` evicts what it does at any setting, and is wanted once.
    once = {(*sizes_of(m).values(), id(getattr(m, "aligner", None))): m for m in methods}
    return list(once.values())


def sizes_of(method: Method) -> Row:
    """What tells a method's row from others: the first columns of every table of results."""
    return {
        "method": method.name,
        "aligner": method.aligner_name,
        "cache_size": method.sizes.cache_size,
        "num_sinks": method.sizes.num_sinks,
        "num_evicted": method.sizes.num_evicted,
    }


def in_turn(
    methods: Sequence[Method], num_each: int, units: str
) -> Iterator[tuple[Method, progress.Bar]]:
    """Each method, and the progress bar, which expects `num_each` units of work a method."""
    with progress.shown_as("eval") as bar:
        bar.expect(len(methods) * num_each, units)
        for method in methods:
            bar.phase(title_of(method))
            yield method, bar


def title_of(method: Method) -> str:
    """What a progress bar calls it."""
    return f"{method.title} C={method.sizes.cache_size}"
