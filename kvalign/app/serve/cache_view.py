"""Contents of a session's cache: after a turn for `GET /v1/sessions/NAME/cache`, read from what is
stored, so no step waits for it; and while an answer comes, if a request asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvalign.cache.sizes import CacheSizes

if TYPE_CHECKING:
    from kvalign.methods.base import Method

MOST_TEXTS = 4096
_MOST_RECALLED = 256
Spans = list[list[int]]
"""Tokens of a conversation, each span from the first to before the last."""


def about(service: Any) -> dict[str, Any]:
    """Settings of a server that say what its sessions hold."""
    method = service.method
    names = ("cache_size", "num_sinks", "num_evicted", "policy", "memory", "num_recalled")
    how = {name: getattr(method.sizes, name) for name in names}
    return {"method": method.in_words, **how, "edit": service.settings.edit}


def view(service: Any, name: str, since: int) -> dict[str, Any]:
    """Return which tokens of a session its cache and its memory hold after its last turn, how many,
    and the texts of the last `MOST_TEXTS` tokens at most, those from `since` on; RequestError for
    an unknown session, or a damaged file.
    """
    session = service.sessions.known(name)
    state, sizes = service.sessions.state(session), service._method_for(session.num_sinks).sizes
    place = service.place_of(session, sizes, session.num_fed)
    index = [x.flatten() for name, x in state.items() if name.endswith(".index")]
    since = max(since, len(session.ids) - MOST_TEXTS)
    return {
        "id": session.id,
        "object": "session.cache",
        "num_tokens": len(session.ids),
        **place.holds(place.num_before, torch.cat(index) if index else None),
        "num_sinks": sizes.num_sinks,
        "num_bytes": sum(x.nbytes for x in state.values()),
        "since": since,
        "texts": [service.spelled(token) for token in session.ids[since:].tolist()],
    }


@dataclass(frozen=True)
class Place:
    """Place of a stream in its conversation, of which `num_gone` tokens after the first `opening`
    are not in it: those of evicted turns. An answer begins after `num_before` of its tokens.
    """

    sizes: CacheSizes
    opening: int
    num_gone: int
    num_before: int

    def holds(self, num_fed: int, index: Tensor | None = None) -> dict[str, Any]:
        """Return what is held of so many tokens of the stream, and their numbers: what its next
        step sees, and what that may take back.

        Args:
            index: tokens of which a head of a layer holds an entry, where heads differ.
        """
        sizes = self.sizes
        if index is not None:
            held, in_memory = _spans_of(index.unique().tolist()), Spans()
        else:
            num_sinks = min(sizes.num_sinks, num_fed)
            first = num_sinks + sizes.num_dropped(num_fed)
            if sizes.memory and num_fed > sizes.cache_size:
                first = num_fed - sizes.num_in_sight
            held = [[0, num_sinks], [first, num_fed]]
            in_memory = [[max(num_sinks, first - sizes.memory), first]] if sizes.memory else []
        held, in_memory = (self.in_conversation(x) for x in (held, in_memory))
        num_held, num_aside = (sum(b - a for a, b in x) for x in (held, in_memory))
        return {
            "num_held": num_held,
            "num_evicted": num_fed + self.num_gone - num_held,
            "num_in_memory": num_aside,
            "held": held,
            "in_memory": in_memory,
        }

    def in_conversation(self, spans: Spans) -> Spans:
        """The same of the conversation, spans that touch as one."""
        begin, by, moved = self.opening, self.num_gone, Spans()
        for start, stop in spans:
            for a, b in ((start, min(stop, begin)), (max(start, begin) + by, stop + by)):
                if a >= b:
                    continue
                if moved and moved[-1][1] == a:
                    moved[-1][1] = b
                else:
                    moved.append([a, b])
        return moved


def _spans_of(tokens: Sequence[int]) -> Spans:
    return [[x, x + 1] for x in tokens if x >= 0]


class Watch:
    """Watch over one step of a method: what its rows take back. Its stepper, whose compiled code
    tells nobody, does not make that step.
    """

    def __init__(self, method: Method):
        self.method, self.stepper = method, method.stepper
        self.memory = getattr(getattr(method, "cache", None), "memory", None)
        self.found: list[Any] = []

    def __enter__(self) -> Watch:
        if self.memory is not None:
            self.memory.watched, self.method.stepper = self.found, None
        return self

    def __exit__(self, *_: object) -> None:
        if self.memory is not None:
            self.memory.watched, self.method.stepper = None, self.stepper

    def recalled(self, row: int, place: Place) -> list[list[int]]:
        """Tokens that a row took back, those first that most heads of all layers did: each with the
        number of these.
        """
        if not self.found:
            return []
        ages = [one.ages[row][one.visible[row]].cpu() for one in self.found]
        last = self.method.cache.seen[row] - 1  # type: ignore[attr-defined]
        tokens, nums = (last - torch.cat(ages)).unique(return_counts=True)
        order = nums.argsort(descending=True, stable=True)[:_MOST_RECALLED]
        tokens = tokens + place.num_gone * (tokens >= place.opening)
        return torch.stack([tokens, nums], 1)[order].tolist()
