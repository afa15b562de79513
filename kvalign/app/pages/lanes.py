"""The cache, seen: a page on which entries come, go stale or are corrected, and are evicted. A lane
shows the places of entries, a strip below it the buffer in which they lie.

One document: no request leaves it, and nothing on it runs but its own script. The script does the
arithmetic of `kvalign.cache.sizes.CacheSizes`, `kvalign.cache.buffer` and `Reencoding.keep` again;
tests/app/test_lanes_in_browser.py compares them.
"""

import base64
import hashlib
import typing

from markupsafe import Markup

from kvalign.app.pages import render, source
from kvalign.foundation.errors import UserError
from kvalign.methods import METHODS
from kvalign.methods.base import Method
from kvalign.models.architectures import Family, ModelSpec

MAX_CACHE_SIZE = 24
FRAME_CACHE_SIZE = 8  # so few that a phone shows all of them, those that go and the new one
SCRIPTS = ("frames.js", "words.js", "lanes.js")
FAMILIES = typing.get_args(Family)
EVICTS = ("after", "before")


def page(
    method: str = "streaming-llm",
    cache_size: int = 7,
    num_sinks: int = 3,
    num_evicted: int = 1,
    controls: bool = True,
    family: str = "learned",
    evicts: str = "after",
) -> str:
    """The page's source: a lane of slots, one for each entry that a step sees, and what a method
    does to it.

    Sizes that the method sets itself are taken from it. `controls` offer other methods, sizes and
    examples; play, step and restart are always there. An eviction comes `after` a step, which sees
    one entry more than the cache keeps, as KV-Align does; or `before`, as other walk-throughs have
    it: room is made first, and a step sees cache_size entries, the new token's with them.
    """
    sizes = {"cache_size": cache_size, "num_sinks": num_sinks, "num_evicted": num_evicted}
    cls, of_token = METHODS.find(method), EVICTS.index(evicts)  # the new token's place is counted
    length = MAX_CACHE_SIZE + 1 - of_token
    spec = ModelSpec("this page", "any", typing.cast(Family, family), 1, 1, 1, length)
    try:
        cls.sizes_for(
            cache_size - of_token,
            None if "num_sinks" in cls.fixed else num_sinks,
            None if "num_evicted" in cls.fixed else num_evicted,
        ).check_fits(spec)
    except UserError as error:
        counted = ", less the new token's place" if of_token else ""
        raise UserError(f"{error}{counted}") from None
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
    """The page in an iframe, with a method's own sizes as far as a lane in sight has room."""
    cache_size = min(method.sizes.cache_size, FRAME_CACHE_SIZE)
    num_sinks = min(method.sizes.num_sinks, cache_size - 1)
    num_evicted = min(method.sizes.num_evicted, cache_size - num_sinks)
    return render(
        "frame.html",
        page=page(method.name, cache_size, num_sinks, num_evicted, family=method.spec.family),
        cache_size=method.sizes.cache_size,
        max_cache_size=FRAME_CACHE_SIZE,
        is_oldest=method.sizes.is_oldest,
    )
