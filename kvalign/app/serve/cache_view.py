"""Contents of a session's cache, for `GET /v1/sessions/NAME/cache`: read from what is stored, so no
step waits for it.
"""

from collections.abc import Iterable
from typing import Any

import torch

from kvalign.app.serve.service import Service
from kvalign.app.serve.sessions import State
from kvalign.cache.sizes import CacheSizes

MOST_TEXTS = 4096


def about(service: Service) -> dict[str, Any]:
    """Settings of a server that say what its sessions hold."""
    method = service.method
    names = ("cache_size", "num_sinks", "num_evicted", "policy", "memory", "num_recalled")
    how = {name: getattr(method.sizes, name) for name in names}
    return {"method": method.in_words, **how, "edit": service.settings.edit}


def view(service: Service, name: str, since: int) -> dict[str, Any]:
    """Return which tokens of a session its cache and its memory hold after its last turn, as spans
    from the first to before the last, how many, and the texts of the last `MOST_TEXTS` tokens at
    most, those from `since` on; RequestError for an unknown session, or a damaged file.

    A token is held if one head of a layer at least holds its entry.
    """
    session = service.sessions.known(name)
    state, sizes = service.sessions.state(session), service._method_for(session.num_sinks).sizes
    num_gone = service.prompts.num_gone(session)
    opening = service.prompts.opening_len(session) if num_gone else 0
    held, aside = _held(state, sizes, session.num_fed - num_gone)
    in_cache, in_memory = (
        [x if x < opening else x + num_gone for x in indices] for indices in (held, aside)
    )
    since = max(since, len(session.ids) - MOST_TEXTS)
    return {
        "id": session.id,
        "object": "session.cache",
        "num_tokens": len(session.ids),
        "num_held": len(in_cache),
        "num_evicted": session.num_fed - len(in_cache),
        "num_in_memory": len(in_memory),
        "num_bytes": sum(x.nbytes for x in state.values()),
        "num_sinks": sizes.num_sinks,
        "held": _spans(in_cache),
        "in_memory": _spans(in_memory),
        "since": since,
        "texts": [service.spelled(token) for token in session.ids[since:].tolist()],
    }


def _held(state: State, sizes: CacheSizes, num_fed: int) -> tuple[Iterable[int], Iterable[int]]:
    """Tokens of a stream of so many that its next step sees, and those that it may take back."""
    index = [x.flatten() for name, x in state.items() if name.endswith(".index")]
    if index:  # each head has its own
        return sorted({*torch.cat(index).tolist()} - {-1}), ()
    num_sinks = min(sizes.num_sinks, num_fed)
    first = num_sinks + sizes.num_dropped(num_fed)
    if sizes.memory and num_fed > sizes.cache_size:
        first = num_fed - sizes.num_in_sight
    aside = range(max(num_sinks, first - sizes.memory), first) if sizes.memory else ()
    return [*range(num_sinks), *range(first, num_fed)], aside


def _spans(indices: Iterable[int]) -> list[list[int]]:
    spans = list[list[int]]()
    for x in indices:
        if spans and spans[-1][1] == x:
            spans[-1][1] = x + 1
        else:
            spans.append([x, x + 1])
    return spans
