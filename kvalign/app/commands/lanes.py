"""`kvalign lanes`: a page of a cache at work. Entries enter, become stale or are corrected, and are
evicted. A lane shows places, and a strip below it the slots of the ring.

It is one document that loads nothing and runs only its own script, which draws the frames that are
recorded here from the cache and the methods.
"""

from __future__ import annotations

import random
import typing
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalign.cache.sizes import OF_MEMORY, CacheSizes
from kvalign.foundation.errors import ExistsError, UserError
from kvalign.foundation.files import write_text
from kvalign.foundation.settings import Settings, like, option
from kvalign.methods.registry import METHODS
from kvalign.models.architectures import Family, ModelSpec

if TYPE_CHECKING:
    from torch import nn

    from kvalign.methods.base import Method

NUM_TOKENS = 60
MAX_CACHE_SIZE = 24
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

LaneEntry = list[int]
"""The token of an entry, the position at which it was encoded, its position now; and 1 if it was
encoded again.
"""
LaneFrame = dict[str, Any]
"""`seen`, the entries that a token attends to, itself the last of them; `stored`, those that stay;
`encoded`, the number of tokens that the model ran on. Of a cache `held`, the token in each slot. Of
a memory `lost`, the tokens in it, and `back`, those that were taken back.
"""


@dataclass(frozen=True, kw_only=True)
class LanesSettings(Settings):
    """Write one self-contained page that shows, step by step, what a method does to the cache. Open
    it in a browser, where you can choose other methods and examples. With --memory it shows which
    entries each step takes back.

    Example:
        kvalign lanes --out cache.html --method streaming-llm --cache-size 7 --num-sinks 3
    """

    out: Path = option(help="file of the page", writes="file")
    method: str = option(
        "kvalign", help="streaming method; for an unknown name the known ones are listed"
    )
    family: str = option(
        "learned", help="how positions are encoded", choices=("learned", "rotary", "alibi")
    )
    cache_size: int = option(7, help="entries the cache keeps, sinks included", at_least=1)
    num_sinks: int = option(3, help="first entries that are never evicted", at_least=0)
    num_evicted: int = option(1, help="entries evicted at once", at_least=1)
    memory: int = like(CacheSizes, "memory", 0, more="")
    num_recalled: int | None = like(CacheSizes, "num_recalled", at_least=1)
    overwrite: bool = option(False, help="replace the file")


def lanes(settings: LanesSettings, as_json: bool) -> dict[str, Any]:
    if settings.out.exists() and not settings.overwrite:
        raise ExistsError(f"{settings.out} already exists: give --overwrite or another --out")

    of_page = settings.as_dict()
    del of_page["out"], of_page["overwrite"]
    source = page(**of_page)  # what does not fit is refused before anything is written
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(settings.out, source)
    if not as_json:
        print(f"page: {settings.out}")
    return {"page": str(settings.out)}


def page(method: str = "kvalign", **how: Any) -> str:
    """Source of the page: a lane of slots, one for each entry that a step sees, and a method at
    work on it. `how` are the settings of `_recording`. A reader may choose other methods of these
    sizes, positions and examples.

    Sizes that the method sets itself come from it. An eviction happens `after` a step, as in
    KV-Align, where a step sees one entry more than the cache keeps; or `before` it, as in other
    walk-throughs, where a step sees cache_size entries including the new token's.

    With a `memory` of so many tokens each step takes back `num_recalled`. In a model the queries
    choose them; here they are drawn with a fixed seed.
    """
    from kvalign.app.pages import rendered

    shown = [_recording(method, **how)]
    plain = {name: value for name, value in how.items() if name not in OF_MEMORY}
    for name in METHODS:
        if name != method:
            with suppress(UserError):  # it does not take these sizes
                shown.append(_recording(name, **plain))
    for title, example in EXAMPLES.items():
        shown.append({**_recording(**example), "title": title})
    return rendered(
        "lanes",
        SCRIPTS,
        examples=EXAMPLES,
        data={
            "recordings": shown,
            "num_tokens": NUM_TOKENS,
            "methods": {name: cls.about for name, cls in METHODS.items()},
            "families": FAMILIES,
        },
    )


def _recording(
    method: str,
    cache_size: int = 7,
    num_sinks: int = 3,
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
            num_evicted if cls.default_num_evicted == 1 else None,
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


def record(name: str, sizes: CacheSizes) -> list[LaneFrame]:
    """A frame for each token of a stream; fewer if it ends at the context length."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from kvalign.methods import make_method
    from kvalign.methods.cached import Cached

    if sizes.memory:
        return [_of_memory(sizes, token) for token in range(NUM_TOKENS)]
    if issubclass(METHODS[name], Cached):
        return _of_cache(sizes)
    ends = dict(bos_token_id=None, eos_token_id=None)
    shape: dict[str, Any] = dict(n_positions=sizes.cache_size + 1, n_embd=2, n_layer=1, n_head=1)
    config = GPT2Config(vocab_size=NUM_TOKENS + 1, **shape, **ends)
    fixed = METHODS[name].fixed
    settings = {x: getattr(sizes, x) for x in ("num_sinks", "num_evicted") if x not in fixed}
    model = GPT2LMHeadModel(config).eval()
    method = make_method(name, model, cache_size=sizes.cache_size, warn=False, **settings)
    return _of_method(method)


def _of_cache(sizes: CacheSizes) -> list[LaneFrame]:
    import torch

    from kvalign.cache.streaming_cache import StreamingCache

    spec = ModelSpec("this page", "any", "learned", 1, 1, 1, None)
    cache, frames = StreamingCache(spec, sizes), []

    def entries() -> list[LaneEntry]:
        tokens = enumerate(cache.index().tolist())
        return [[token, sizes.num_stored(token), now] for now, token in tokens]

    for token in range(NUM_TOKENS):
        num = cache.num_stored
        seen = [*entries(), [token, num, num]]
        cache.update(*2 * [torch.full((1, 1, 1, 1), float(token))], 0)
        held = cache.layers[0].entries.data.keys[0, 0, :, 0]
        slots = held[: min(token, sizes.cache_size) + 1].int().tolist()
        frames.append({"seen": seen, "stored": entries(), "encoded": 1, "held": slots})
    return frames


def _of_method(method: Method) -> list[LaneFrame]:
    """Frames of what a method runs its model on; it stores what the next token joins."""
    import torch

    from kvalign.methods.as_encoded import Reencoding

    ran, seen, frames = [0], list[LaneEntry](), list[LaneFrame]()

    def note(model: nn.Module, args: Any, kwargs: Any) -> None:
        ran[0] = kwargs["input_ids"].shape[1]

    method.model.register_forward_pre_hook(note, with_kwargs=True)
    for token in range(NUM_TOKENS + 1):
        try:
            method.feed(torch.tensor([[token]]))
        except UserError:  # at the context length
            return frames
        if ran[0] == 1:
            seen = [*seen, [token, len(seen), len(seen)]]
        else:
            assert isinstance(method, Reencoding)
            kept = enumerate(method.rows[0].tolist())
            seen = [[one, at, at, *[1] * (one != token)] for at, one in kept]
        if frames:
            frames[-1]["stored"] = seen[:-1]
        frames.append({"seen": seen, "stored": seen, "encoded": ran[0]})
    return frames[:-1]


def _of_memory(sizes: CacheSizes, token: int) -> LaneFrame:
    """Frame of a cache with a memory. There are no queries: chance says which entries come back."""
    num_sinks, size, in_sight = sizes.num_sinks, sizes.cache_size, sizes.num_in_sight
    gone = range(num_sinks, token - in_sight) if token > size else range(0)
    lost = [*gone][-sizes.memory :]
    chance = random.Random(token)
    drawn = sorted(lost, key=lambda one: chance.random() ** (token - one))
    back = sorted(drawn[-(sizes.num_recalled or 0) :])
    window = range(token - in_sight, token) if lost else range(num_sinks, token)

    def placed(indices: list[int], first: int = 0) -> list[LaneEntry]:
        return [[x, min(x, size), now] for now, x in enumerate(indices, first)]

    seen = placed([*range(min(num_sinks, token)), *back, *window, token])
    stored = seen
    if token >= size:
        kept = placed([*range(token + 1 - in_sight, token + 1)], size - in_sight)
        stored = [*seen[:num_sinks], *kept]
    return {"seen": seen, "stored": stored, "encoded": 1, "lost": lost, "back": back}
