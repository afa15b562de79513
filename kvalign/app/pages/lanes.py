"""Page of a cache at work: entries enter, become stale or are corrected, and are evicted. A lane
shows places, and a strip below it the slots of the ring.

It is one document that loads nothing and runs only its own script. The script repeats the
arithmetic of `kvalign.cache.sizes.CacheSizes` and its slots, `kvalign.memory.recall` and
`Reencoding.keep`. tests/app/test_lanes_in_browser.py compares the two.
"""

import base64
import hashlib
import typing

from markupsafe import Markup

from kvalign.app.pages import render, source
from kvalign.foundation.errors import UserError
from kvalign.methods.base import Method
from kvalign.methods.registry import METHODS
from kvalign.models.architectures import Family, ModelSpec

MAX_CACHE_SIZE = 24
FRAME_CACHE_SIZE = 8  # so few that a phone shows all of them, those that go and the new one
SCRIPTS = ("frames.js", "words.js", "lanes.js")
FAMILIES = typing.get_args(Family)
EVICTS = ("after", "before")


def page(
    method: str = "kvalign",
    cache_size: int = 7,
    num_sinks: int = 3,
    num_evicted: int = 1,
    controls: bool = True,
    family: str = "learned",
    evicts: str = "after",
    memory: int = 0,
    num_recalled: int | None = None,
) -> str:
    """Source of the page: a lane of slots, one for each entry that a step sees, and a method at
    work on it.

    Sizes that the method sets itself come from it. `controls` offer other methods, sizes and
    examples. Play, step and restart are always there. An eviction happens `after` a step, as in
    KV-Align, where a step sees one entry more than the cache keeps; or `before` it, as in other
    walk-throughs, where a step sees cache_size entries including the new token's.

    With a `memory` of so many tokens each step takes back `num_recalled`. In a model the queries
    choose them; here they are drawn with a fixed seed.
    """
    sizes = dict(
        cache_size=cache_size,
        num_sinks=num_sinks,
        num_evicted=num_evicted,
        memory=memory,
        num_recalled=num_recalled,
    )
    cls, of_token = METHODS.find(method), EVICTS.index(evicts)  # the new token's place is counted
    length = MAX_CACHE_SIZE + 1 - of_token
    spec = ModelSpec("this page", "any", typing.cast(Family, family), 1, 1, 1, length)
    try:
        cls.sizes_for(
            cache_size - of_token,
            None if "num_sinks" in cls.fixed else num_sinks,
            None if "num_evicted" in cls.fixed else num_evicted,
            memory=memory,
            num_recalled=num_recalled,
        ).check_fits(spec)
    except UserError as error:
        counted = ", less the new token's place" if of_token else ""
        raise UserError(f"{error}{counted}") from None
    can_place = cls.takes_aligner or (cls.takes_policy and family == "rotary")
    if memory and (not can_place or family == "alibi"):
        raise UserError(
            f"memory does not work with {method} on {family} positions: use kvalign, or window "
            "or streaming-llm on rotary positions"
        )
    script = Markup("\n").join(map(source, SCRIPTS))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return render(
        "lanes.html",
        style=source("lanes.css"),
        script=script,
        script_hash=f"sha256-{digest}",
        data={
            "settings": {"method": method, "family": family, "evicts": evicts, **sizes},
            "controls": controls,
            "max_cache_size": MAX_CACHE_SIZE,
            "methods": {name: cls.about for name, cls in METHODS.items()},
            "families": FAMILIES,
            "evicts": EVICTS,
        },
    )


def frame(method: Method) -> str:
    """Frame with the page, with a method's own sizes as far as the lane has room."""
    sizes = method.sizes
    cache_size = min(sizes.cache_size, FRAME_CACHE_SIZE)
    least = 2 if sizes.memory else 1  # entries of a window
    num_sinks = min(sizes.num_sinks, cache_size - least)
    num_evicted = min(sizes.num_evicted, cache_size - num_sinks)
    source = page(
        method.name,
        cache_size,
        num_sinks,
        num_evicted,
        family=method.spec.family,
        memory=sizes.memory,
    )
    return render(
        "frame.html",
        page=source,
        cache_size=sizes.cache_size,
        max_cache_size=FRAME_CACHE_SIZE,
        is_oldest=sizes.is_oldest,
    )
