"""`kvalign compile`: compile the decode step of a model and keep it for later starts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from kvalign.app.cli.next_steps import say_next
from kvalign.app.sessions.stream_settings import MethodSettings
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import NUM_SINKS, OF_WEIGHTS, WEIGHTS, ModelSettings, option


@dataclass(frozen=True, kw_only=True)
class CompileSettings(MethodSettings, ModelSettings):
    """Compile the decode step of a model once. generate, chat and serve then take it.

    The step goes into your cache folder (KVALIGN_CACHE moves it). It is for one stream with these
    weights and, without our kernel, this cache size. serve --compile makes another one for several
    streams. Compiling needs a C++ compiler; later starts do not.

    Example:
        kvalign compile --model llama-mini --method streaming-llm --cache-size 32
    """

    weights: str = option("auto", help=OF_WEIGHTS, choices=WEIGHTS)
    num_sinks: int | None = option(None, help=NUM_SINKS, at_least=0)


def compile(settings: CompileSettings, as_json: bool) -> dict[str, Any]:
    from kvalign.methods import make_method
    from kvalign.models.loading import load_model
    from kvalign.models.packed import weights_of
    from kvalign.steppers.stored import folder

    loaded = load_model(settings.model, settings.device, settings.dtype, settings.weights)
    method = make_method(
        settings.method,
        loaded.model,
        cache_size=settings.cache_size,
        num_sinks=settings.num_sinks,
        aligner=settings.aligner,
        compile=True,
        **settings.sizes(),
    )
    began, size = time.perf_counter(), method.sizes.cache_size
    if method.stepper is None or not method.stepper.prepare(method, 1):
        raise UserError(
            f"the step of {method.in_words} cannot be stored. Steps of streaming-llm and window "
            "can, on a CPU with a C++ compiler, if each step evicts an entry. --compile "
            "compiles other steps at each start"
        )
    seconds = time.perf_counter() - began
    about = {"model": settings.model, "method": method.name, "cache_size": size}
    about |= {"weights": weights_of(loaded.model), "folder": str(folder()), "seconds": seconds}
    if not as_json:
        print(f"{method.in_words}, weights {about['weights']}: the step is ready ({folder()})")
        words = ("--model", settings.model, "--method", method.name)
        say_next("generate", *words, "--cache-size", str(size))
    return about
