"""Page of a cache at work: entries enter, become stale or are corrected, and are evicted. A lane
shows places, and a strip below it the slots of the ring.

It is one document that loads nothing and runs only its own script, which draws the frames that
`kvalign.app.pages.frames` has recorded.
"""

import base64
import hashlib
import typing
from typing import Any

from markupsafe import Markup

from kvalign.app.pages import render, source
from kvalign.app.pages.frames import NUM_TOKENS, record
from kvalign.foundation.errors import UserError
from kvalign.methods.base import Method
from kvalign.methods.registry import METHODS
from kvalign.models.architectures import Family, ModelSpec

MAX_CACHE_SIZE = 24
FRAME_CACHE_SIZE = 8  # so few that a phone shows all of them, those that go and the new one
SCRIPTS = ("words.js", "lanes.js")
FAMILIES = typing.get_args(Family)
EVICTS = ("after", "before")
_FIGURE = {"method": "streaming-llm", "cache_size": 7, "num_sinks": 3}
EXAMPLES: dict[str, dict[str, Any]] = {
    "StreamingLLM, figure 4": {**_FIGURE, "family": "rotary", "num_sinks": 4, "shown": 9},
    "GPT-2, 3 sinks, 7 entries": _FIGURE,
    "the same, evicting before a step": {**_FIGURE, "evicts": "before"},
    "with a memory": {
        "method": "streaming-llm",
        "family": "rotary",
        **{"cache_size": 8, "num_sinks": 2, "memory": 30, "num_recalled": 2, "shown": 45},
    },
}
"""What a reader may choose beside the methods; `shown` is the token that it begins with."""


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

    Sizes that the method sets itself come from it. `controls` offer other methods of these sizes,
    positions and examples. Play, step and restart are always there. An eviction happens `after` a
    step, as in KV-Align, where a step sees one entry more than the cache keeps; or `before` it, as
    in other walk-throughs, where a step sees cache_size entries including the new token's.

    With a `memory` of so many tokens each step takes back `num_recalled`. In a model the queries
    choose them; here they are drawn with a fixed seed.
    """
    how: dict[str, Any] = {"cache_size": cache_size, "num_sinks": num_sinks, "family": family}
    how |= {"num_evicted": num_evicted, "evicts": evicts}
    shown = [_recording(method, memory=memory, num_recalled=num_recalled, **how)]
    if controls:
        for name in METHODS:
            if name != method:
                try:
                    shown.append(_recording(name, **how))
                except UserError:
                    continue  # it does not take these sizes
        for title, example in EXAMPLES.items():
            shown.append({**_recording(**example), "title": title})
    script = Markup("\n").join(map(source, SCRIPTS))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return render(
        "lanes.html",
        style=source("lanes.css"),
        script=script,
        script_hash=f"sha256-{digest}",
        examples=EXAMPLES,
        data={
            "recordings": shown,
            "controls": controls,
            "num_tokens": NUM_TOKENS,
            "methods": {name: cls.about for name, cls in METHODS.items()},
            "families": FAMILIES,
        },
    )


def _recording(
    method: str,
    cache_size: int,
    num_sinks: int,
    num_evicted: int = 1,
    family: str = "learned",
    evicts: str = "after",
    memory: int = 0,
    num_recalled: int | None = None,
    shown: int | None = None,
) -> dict[str, Any]:
    """Frames of a method, and its settings; UserError for sizes that do not fit."""
    cls, of_token = METHODS.find(method), EVICTS.index(evicts)  # the new token's place is counted
    length = MAX_CACHE_SIZE + 1 - of_token
    spec = ModelSpec("this page", "any", typing.cast(Family, family), 1, 1, 1, length)
    try:
        sizes = cls.sizes_for(
            cache_size - of_token,
            None if "num_sinks" in cls.fixed else num_sinks,
            None if "num_evicted" in cls.fixed else num_evicted,
            memory=memory,
            num_recalled=num_recalled,
        )
        sizes.check_fits(spec)
    except UserError as error:
        counted = ", less the new token's place" if of_token else ""
        raise UserError(f"{error}{counted}") from None
    can_place = cls.takes_aligner or (cls.takes_policy and family == "rotary")
    if memory and (not can_place or family == "alibi"):
        raise UserError(
            f"memory does not work with {method} on {family} positions: use kvalign, or window "
            "or streaming-llm on rotary positions"
        )
    return {
        "method": method,
        "family": family,
        "evicts": evicts,
        "cache_size": cache_size,
        "num_kept": sizes.cache_size,
        "num_sinks": sizes.num_sinks,
        "num_evicted": sizes.num_evicted,
        "memory": memory,
        "num_recalled": sizes.num_recalled or 0 if memory else 0,
        "shown": shown,
        "frames": record(method, sizes),
    }


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
        controls=False,
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
