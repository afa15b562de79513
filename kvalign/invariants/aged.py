"""Stream long past its first eviction, observed from its first token."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from kvalign.cache.base import FixedSizeCache
from kvalign.cache.realigner import LONG_RUN
from kvalign.invariants.stream import NotApplicableError, Stream, Watched, matches
from kvalign.invariants.subject import Subject, first_layer, once

FIRST_INPUT = 5


@dataclass
class Aged:
    """Stream that is long past its first eviction.

    Attributes:
        fault: largest difference, in entries, between what the cache reported and what attention
            got.
        where: the token of that difference, from 0.
        num_sinks: first tokens that were all present after the first eviction; None before it.
        seen: for some tokens, the tokens [S] that it saw, itself the last; empty if that is
            unknown, for the reason in `no_seen`.
        hidden: for the same tokens, the first layer's output [N].
    """

    stream: Stream
    fault: int
    where: int
    num_sinks: int | None
    seen: list[Tensor]
    hidden: list[Tensor]
    no_seen: str = ""

    @property
    def watched(self) -> Watched:
        assert self.stream.watched is not None
        return self.stream.watched


@once
def age(subject: Subject) -> Aged:
    """Feed a stream until entries have been moved back at least once, and keep it."""
    stream = subject.stream(is_watched=True)
    if stream.watched is None:
        raise NotApplicableError("it re-encodes the kept tokens: there is no cache to look at")
    capacity = subject.capacity
    num = 2 * capacity + max(capacity, LONG_RUN) + 16 if subject.evicts else capacity
    if isinstance(stream.cache, FixedSizeCache):
        while stream.cache.frame.num_behind(num) and num < 4 * (capacity + LONG_RUN):
            num += 1
    ids, num_fed = subject.ids(1, num), 0
    aged = Aged(stream, fault=0, where=0, num_sinks=None, seen=[], hidden=[])
    with first_layer_outputs(subject.model) as outputs:
        while num_fed < num:
            size = min(FIRST_INPUT, capacity) if num_fed == 0 else 1
            stream.feed(ids[:, num_fed : num_fed + size])
            fault = _fault(stream.watched, num_fed, size, num_fed > capacity)
            if fault > aged.fault:
                aged.fault, aged.where = fault, num_fed
            num_fed += size
            if aged.num_sinks is None and stream.num_read < num_fed - size:
                aged.num_sinks = _num_sinks(stream.watched)
            if num_fed > capacity + 1 and num_fed % max(1, capacity // 4) == 0 and not aged.no_seen:
                try:
                    aged.seen.append(stream.seen())
                    aged.hidden.append(outputs[-1][0, -1])
                except NotApplicableError as reason:
                    aged.no_seen = str(reason)
            outputs.clear()
    return aged


@contextmanager
def first_layer_outputs(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """List that collects the first layer's output [B, T, N]."""
    outputs: list[Tensor] = []
    handle = first_layer(model).register_forward_hook(
        lambda module, args, out: outputs.append(out[0] if isinstance(out, tuple) else out)
    )
    try:
        yield outputs
    finally:
        handle.remove()


def _fault(watched: Watched, num_before: int, num_new: int, has_evicted: bool) -> int:
    """Entries by which the cache's report is wrong."""
    position, faults = watched.positions[-num_new], []
    for layer, (length, offset) in enumerate(watched.mask_sizes):
        faults.append(abs(length - watched.lengths[layer]))
        if not getattr(watched.cache.layers[watched.layers[layer]], "is_compileable", False):
            faults.append(abs(offset + length - position - num_new))  # the newest is the last
    if not has_evicted:
        faults.append(abs(position - num_before))
    return max(faults)


def tokens_of(watched: Watched) -> list[int | None]:
    """Tokens of the entries that the last token of the first row found."""
    values = watched.entries[0][1][0, :, : watched.num_read]
    return matches(values, watched.originals()[1][0, :, :-1])


def _num_sinks(watched: Watched) -> int:
    """Return how many of the first tokens are all present; 0 if that is unknown."""
    try:
        tokens = set(tokens_of(watched))
    except NotApplicableError:
        return 0
    return next(n for n in range(len(tokens) + 1) if n not in tokens)
