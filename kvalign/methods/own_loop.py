"""Cache for a user's own loop, which calls the model itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from kvalign.foundation.errors import UserError
from kvalign.foundation.names import check_keywords, spelled_out
from kvalign.methods import MethodConfig, described, make_method
from kvalign.methods.cached import Cached
from kvalign.methods.choice import choose, how_to_train, lack_of_aligner
from kvalign.methods.registry import AUTO, METHODS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvalign.cache.streaming_cache import StreamingCache


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
