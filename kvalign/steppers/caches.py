"""Caches, and passes of them, whose steps a stepper makes."""

from typing import Any, TypeGuard

from kvalign.cache.streaming_cache import StreamingCache


def is_plain(cache: Any) -> TypeGuard[StreamingCache]:
    """Return whether a cache has nothing but sinks and windows."""
    return isinstance(cache, StreamingCache) and cache.memory is None


def may_be_static(cache: StreamingCache) -> bool:
    """Return whether attention can be told, in all layers, which slots have no entry yet."""
    is_told = cache.takes_marks and not cache.goes_by_order and cache.config is not None
    return is_told and len(cache.attention) == len(cache.layers)


def stays(cache: StreamingCache) -> bool:
    """Return whether a step writes entries as they come and reads them as they lie."""
    layer = cache.attention[0]
    realigner = cache.realigner
    is_kept = realigner.strategy != "read" and realigner.place_positions is None
    return layer.sources is layer.entries and is_kept


def is_usual(cache: Any) -> bool:
    """Return whether the layers do the same in the pass that a cache is in as in every step of a
    full cache.
    """
    if not isinstance(cache, StreamingCache) or cache.step is None:
        return False
    finds_all = cache.memory is None or cache.memory.finds_all
    return cache.is_decode and cache.step.is_alike and finds_all
