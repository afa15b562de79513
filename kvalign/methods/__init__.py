"""Streaming methods: the registry, and how one is made, or its cache alone for your own loop."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from kvalign.cache.sizes import SizesConfig
from kvalign.foundation.errors import UserError
from kvalign.foundation.names import check_keywords, spelled_out
from kvalign.foundation.settings import typed
from kvalign.methods.registry import AUTO, METHODS, check_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvalign.aligners import Aligner
    from kvalign.cache.streaming_cache import StreamingCache
    from kvalign.methods.base import Method
    from kvalign.methods.choice import Choice

log = logging.getLogger(__name__)


class MethodConfig(SizesConfig, total=False):
    """Settings of a method, besides its name and its cache_size: the keywords of everything that
    streams.

    Attributes:
        aligner: for `kvalign`: an aligner, its folder, shipped name or hub id; None: the one that
            `kvalign.methods.choice.choose` finds.
    """

    aligner: Aligner | str | Path | None


@spelled_out(MethodConfig)
def make_method(
    name: str | Choice,
    model: PreTrainedModel,
    *,
    cache_size: int | None = None,
    compile: bool | None = False,
    warn: bool = True,
    num_streams: int = 1,
    **config: Unpack[MethodConfig],
) -> Method:
    """Make a method that is ready to stream. All errors in the arguments are raised here, before
    any work.

    Args:
        name: key of `METHODS`, or `auto`. `auto` chooses `kvalign` if an aligner is given, ships or
            was trained here, and was not measured as worse than `discard-half`; else
            `streaming-llm` on rotary and ALiBi positions and `discard-half` on learned ones
            (`kvalign.methods.choice.choose`). The choice is logged, unless it is given instead.
        model: a causal LM of transformers, also wrapped: with adapter layers of PEFT (LoRA), by
            `torch.compile` or DDP.
        cache_size: see `CacheSizes`; None: as large as the model and the machine allow
            (`kvalign.cache.default_size`), which is logged.
        compile: compile the step of a full cache (`Method.compile`). None: compile nothing, and
            take the fastest steps that are ready (`Method.take_ready_stepper`), the default of all
            that writes text: `kvalign.stream`, `chat`, the command line. False: call the model,
            which measurements of methods do, and whose logits have gradients.
        warn: log, once, if the method leaves entries stale on learned positions, and if an input is
            longer than the cache. False for deliberate comparisons of methods.
        num_streams: number of streams for which a cache_size of None leaves memory.
        config: see `MethodConfig`.

    Raises:
        UserError: an unknown method, sizes that are not whole numbers or do not fit, no aligner or
            one of another model, PEFT's prompt tuning.
        KeywordError: an unknown setting, with the nearest known one.
        TypeError: the model is not one of transformers.
    """
    check_keywords(make_method, config)
    from kvalign.methods.choice import Choice, choose, needs_cache, warn_if_stale
    from kvalign.models.wrapped import unwrapped

    inner, asked = unwrapped(model), dict[str, Any](config)
    aligner = asked.pop("aligner", None)
    if cache_size is not None:
        cache_size = typed("cache_size", cache_size, int)
    if isinstance(name, Choice):
        choice = name
    else:
        check_name(name)
        cached = needs_cache(asked)
        choice = choose(inner, name, cache_size=cache_size, aligner=aligner, cached=cached)
        if name == AUTO or choice.note:
            how = "auto uses " if name == AUTO else ""
            log.info("%s%s: %s", how, choice.method, choice.why or choice.note)
    if asked.get("num_sinks") is None:
        asked["num_sinks"] = choice.num_sinks
    cls, aligner = METHODS[choice.method], choice.aligner
    for size in cls.ignored_settings():
        if (value := asked.pop(size, None)) not in (None, 0):
            log.warning("%s=%s has no effect on %s: it %s", size, value, choice.method, cls.about)
    loaded = _load_aligner(aligner, inner) if cls.takes_aligner else None
    why_size = ""
    if cache_size is None:
        from kvalign.cache.default_size import default_size

        cache_size, why_size = default_size(
            inner,
            longest=loaded.config.largest_cache if loaded else None,
            realign_every=asked.get("realign_every"),
            num_streams=num_streams,
            cache_dtype=asked.get("cache_dtype"),
        )
        log.info("cache_size %s: %s", cache_size, why_size)
    if aligner is not None and not loaded:
        log.warning("%s uses no aligner: the given one has no effect", choice.method)
    options: dict[str, Any] = {"aligner": loaded} if loaded else {}
    sizes = cls.sizes_for(cache_size, **options, **asked)
    if sizes.memory:
        from kvalign.memory.plan import as_planned

        sizes = as_planned(inner, loaded, sizes, asked, warn)
    method = cls(model, sizes, **options)
    method.why_size, method.warns = why_size, warn
    if warn:
        warn_if_stale(method)
    if compile is None:
        return method.take_ready_stepper()
    return method.compile() if compile else method


@spelled_out(MethodConfig)
def make_cache(
    model: PreTrainedModel,
    *,
    cache_size: int | None = None,
    method: str = AUTO,
    **config: Unpack[MethodConfig],
) -> StreamingCache:
    """Make a `StreamingCache` for your own loop. Pass it as `past_key_values`, without mask or
    position ids. A full cache takes one token a call, since a call evicts nothing between its
    tokens; `kvalign.stream_tokens`, and `feed` of `make_method`, read many. The way back
    (`backward`) of a step takes the entries that are stored, its own among them, as constants.

    Args:
        model: a causal LM of transformers.
        cache_size: entries stored between steps; None: as in `make_method`. The first input may
            have one token more, and later ones what is left of these (`cache.room`). A longer one
            is refused.
        method: one that keeps and moves entries: kvalign, streaming-llm or window; auto: the first
            of these that fits the model.
        config: see `MethodConfig`.

    Raises:
        UserError: as in `make_method`; a method without such a cache; auto on learned positions
            without an aligner.
    """
    check_keywords(make_cache, config)
    from kvalign.methods.cached import Cached
    from kvalign.methods.choice import choose, how_to_train, lack_of_aligner

    streaming = make_method(method, model, cache_size=cache_size, **config)
    if not isinstance(streaming, Cached):
        if method == AUTO:
            model = streaming.model
            choice = choose(model, cache_size=cache_size, cached=True)
            if choice.aligner is not None:  # worse than `discard-half`, which has no such cache
                config["aligner"] = choice.aligner
                return make_cache(model, cache_size=cache_size, method=choice.method, **config)
            lack = lack_of_aligner(model, cache_size)
            raise UserError(
                f"no cache keeps entries correct on {described(model)}: {lack}; train one "
                f"({how_to_train(model, cache_size)}) and give its folder as aligner=, or use "
                "method streaming-llm, which leaves entries stale"
            )
        cached = [name for name, cls in METHODS.items() if issubclass(cls, Cached)]
        raise UserError(
            f"{method} {streaming.about}: it has no streaming cache (these have one: "
            f"{', '.join(cached)})"
        )
    return streaming.cache


def _load_aligner(aligner: Aligner | str | Path | None, model: PreTrainedModel) -> Aligner:
    from kvalign.aligners import Aligner
    from kvalign.methods.choice import choose, how_to_train

    if isinstance(aligner, Aligner):
        return aligner
    if aligner is None:
        raise UserError(
            f"no aligner ships for {described(model)}: use method {choose(model).method}, "
            f"which needs none, or train one ({how_to_train(model)}) and give its folder "
            "(--aligner, aligner=)"
        )
    return Aligner.from_pretrained(aligner)


def described(model: PreTrainedModel) -> str:
    """`gpt2 (learned positions)`."""
    from kvalign.models.architectures import spec_of

    spec = spec_of(model.config)
    return f"{spec.name or 'this model'} ({spec.family} positions)"
