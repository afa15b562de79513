"""Streaming methods: one file and one line here each. The command line, reports and tests read this
registry.
"""

import difflib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kvalign import checkpoints
from kvalign.aligners import Aligner
from kvalign.cache import StreamingCache
from kvalign.methods.base import Cached, Method
from kvalign.methods.dense import Dense
from kvalign.methods.discard_half import DiscardHalf
from kvalign.methods.kvalign import KVAlign
from kvalign.methods.recompute import Recompute
from kvalign.methods.streaming_llm import StreamingLLM
from kvalign.methods.window import Window
from kvalign.models import spec_of

log = logging.getLogger(__name__)

METHODS: dict[str, type[Method]] = {
    cls.name: cls for cls in (Dense, Window, StreamingLLM, Recompute, DiscardHalf, KVAlign)
}
"""Methods by the name that the command line knows them by."""


def make_method(
    name: str,
    model: PreTrainedModel,
    *,
    cache_size: int,
    num_sinks: int | None = None,
    num_evicted: int | None = None,
    aligner: Aligner | str | Path | None = None,
) -> Method:
    """Make a method ready to stream; everything that can be wrong is said here, before any work.

    Args:
        name: key of `METHODS`.
        model: a causal LM of transformers.
        cache_size, num_sinks, num_evicted: entries; None takes the method's default.
        aligner: for `kvalign`: an aligner, its folder, shipped name or hub id; None takes the
            shipped one.

    Raises:
        ValueError: unknown method, sizes that do not fit, no aligner, or one made for another
            model.
        FileNotFoundError: no aligner of that name.
        TypeError: the model is none.
    """
    if not hasattr(model, "config"):
        raise TypeError(
            f"the model must be a causal LM of transformers, got {type(model).__name__}: "
            "kvalign.load_model(name).model, or AutoModelForCausalLM.from_pretrained(name)"
        )
    cls = method_class(name)
    sizes: dict[str, Any] = {
        "cache_size": cache_size,
        "num_sinks": num_sinks,
        "num_evicted": num_evicted,
    }
    for size in cls.fixed:
        if sizes[size] is not None:
            log.warning("%s %s: %s=%s has no effect", name, cls.about, size, sizes[size])
            sizes[size] = None
    if cls.takes_aligner:
        sizes["aligner"] = (
            aligner if isinstance(aligner, Aligner) else _load_aligner(aligner, model)
        )
    elif aligner is not None:
        log.warning("%s takes no aligner: the one given has no effect", name)
    return cls(model, **sizes)


def make_cache(
    model: PreTrainedModel, *, cache_size: int, method: str = "kvalign", **options: Any
) -> StreamingCache:
    """A `StreamingCache` for a loop of your own: pass it as `past_key_values`, with neither mask
    nor position ids.

    Args:
        model: a causal LM of transformers.
        cache_size: entries stored between steps. The first input may have one more; feed a longer
            one in parts that fit, or let `kvalign.stream_tokens` do it.
        method: one that keeps entries and moves them: kvalign, streaming-llm or window.
        options: num_sinks, num_evicted, aligner: as in `make_method`.

    Raises:
        ValueError, FileNotFoundError: as in `make_method`, or a method without such a cache.
    """
    made = make_method(method, model, cache_size=cache_size, **options)
    if not isinstance(made, Cached):
        cached = [name for name, cls in METHODS.items() if issubclass(cls, Cached)]
        raise ValueError(
            f"{method} {made.about}: it has no streaming cache (these have: {', '.join(cached)})"
        )
    return made.cache


def make_methods(
    names: Iterable[str],
    model: PreTrainedModel,
    *,
    aligners: Sequence[Aligner | str] | None = None,
    **sizes: Any,
) -> list[Method]:
    """Methods to compare: one a name, and of `kvalign` one an aligner (None: the shipped one)."""
    return [
        make_method(name, model, aligner=aligner, **sizes)
        for name in names
        for aligner in ((aligners or (None,)) if method_class(name).takes_aligner else (None,))
    ]


def method_class(name: str) -> type[Method]:
    """The class of a method; ValueError with the nearest and all known names."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"unknown method {name!r}{hint} (known: {', '.join(METHODS)})")
    return METHODS[name]


def _load_aligner(aligner: str | Path | None, model: PreTrainedModel) -> Aligner:
    aligner = aligner or checkpoints.default_aligner(model.config.name_or_path)
    if aligner is None:
        spec = spec_of(model.config)
        without = "discard-half" if spec.family == "learned" else "streaming-llm"
        raise ValueError(
            f"no aligner ships for {spec.name or 'this model'} ({spec.family} positions): take "
            f"method {without}, which needs none, or train one (kvalign train --aligner-kind "
            "table) and name its folder as aligner"
        )
    return Aligner.from_pretrained(aligner)
