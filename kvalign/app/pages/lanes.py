"""The cache, seen: a page on which entries come, move, go stale or are corrected, and are evicted.

One document: no request leaves it, and nothing on it runs but its own script. The script does the
arithmetic of `kvalign.cache.Slots` and `Reencoding.keep` again; tests/test_lanes.py compares them.
"""

import base64
import hashlib
import json
import typing
from html import escape
from importlib import resources
from string import Template
from typing import Any

from kvalign.errors import UserError
from kvalign.methods import METHODS
from kvalign.methods.base import Method
from kvalign.models import Family, ModelSpec
from kvalign.sizes import CacheSizes

MAX_CACHE_SIZE = 24
SCRIPTS = ("frames.js", "words.js", "lanes.js")
FAMILIES = typing.get_args(Family)


def page(
    method: str = "streaming-llm",
    cache_size: int = 7,
    num_sinks: int = 3,
    num_evicted: int = 1,
    controls: bool = True,
    family: str = "learned",
) -> str:
    """The page's source: a lane of cache_size + 1 slots and what a method does to it.

    Args:
        method: key of `METHODS`. Sizes that it sets itself are taken from it.
        cache_size: entries stored between steps, at most `MAX_CACHE_SIZE`.
        num_sinks: first entries, never evicted.
        num_evicted: entries evicted at once.
        controls: offer other methods, sizes and examples; play, step and restart are always there.
        family: how the model encodes positions: learned, rotary or alibi.

    Raises:
        UserError: unknown method or family, or sizes that do not fit together or into the lane.
    """
    sizes = {"cache_size": cache_size, "num_sinks": num_sinks, "num_evicted": num_evicted}
    for name, size in sizes.items():
        if type(size) is not int:
            raise UserError(f"{name} must be a whole number, got {size!r:.80}")
    if type(controls) is not bool:
        raise UserError(f"controls must be True or False, got {controls!r:.80}")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(f"family must be one of {', '.join(FAMILIES)}, got {family!r:.80}")
    if not isinstance(method, str):
        raise UserError(f"method must be a name, got {method!r:.80}")
    fixed = METHODS.find(method).fixed
    shown = CacheSizes(
        cache_size,
        0 if "num_sinks" in fixed else num_sinks,
        1 if "num_evicted" in fixed else num_evicted,
    )
    shown.check_fits(
        ModelSpec("this page", "any", typing.cast(Family, family), 1, 1, 1, MAX_CACHE_SIZE + 1)
    )
    return _render(
        {
            "settings": {"method": method, "family": family, **sizes},
            "controls": controls,
            "max_cache_size": MAX_CACHE_SIZE,
            "methods": {name: cls.about for name, cls in METHODS.items()},
            "families": FAMILIES,
        }
    )


def frame(method: Method) -> str:
    """The page in an iframe, with a method's own sizes as far as they go into the lane."""
    cache_size = min(method.sizes.cache_size, MAX_CACHE_SIZE)
    num_sinks = min(method.sizes.num_sinks, cache_size - 1)
    num_evicted = min(method.sizes.num_evicted, cache_size - num_sinks)
    source = page(method.name, cache_size, num_sinks, num_evicted, family=method.spec.family)
    note = ""
    if cache_size < method.sizes.cache_size:
        note = f"The lane has room for {cache_size} entries: it shows them in place of "
        note = f'<p class="note">{note}{method.sizes.cache_size}.</p>'
    return f'{note}<iframe title="The cache" srcdoc="{escape(source)}"></iframe>'


def _render(data: dict[str, Any]) -> str:
    script = "\n".join(_template(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_template("lanes.html")).substitute(
        style=_template("lanes.css"),
        script=script,
        script_hash=f"sha256-{digest}",
        data=json.dumps(data).replace("<", "\\u003c"),  # ends no script element
    )


def _template(name: str) -> str:
    folder = resources.files("kvalign.app.pages").joinpath("templates")
    return folder.joinpath(name).read_text(encoding="utf-8")
