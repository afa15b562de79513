"""Invariants of feeding: the result does not depend on how tokens are fed, nor on rows that change
places, occur twice, or come back from a file.
"""

import random
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from kvalign.cache.base import FixedSizeCache
from kvalign.invariants.stream import NotApplicableError, Stream, is_exact
from kvalign.invariants.subject import Measured, Subject, difference, invariant

NUM_ROWS = 3
MOST_AT_ONCE = 7
NUM_AFTER = 24  # tokens fed after a change of rows

Feed = Callable[[Tensor], Tensor]


def _apart(one: Feed, other: Feed, parts: Iterable[Tensor]) -> float:
    """Largest difference of the logits of two ways of feeding, part after part."""
    return max((difference(one(part), other(part)) for part in parts), default=0.0)


def _parts(ids: Tensor, most: int = 1) -> Iterator[Tensor]:
    """Ids [B, T] in parts of up to so many tokens."""
    rng, start = random.Random(0), 0
    while start < ids.shape[1]:
        end = start + rng.randint(1, most)
        yield ids[:, start:end]
        start = end


@invariant(
    "while nothing is evicted it equals the model without a cache",
    look_at="the entries that update returns before the first eviction, and their number",
)
def dense(subject: Subject) -> Measured:
    ids, stream = subject.ids(1, subject.num_unevicted), subject.stream()
    logits = (stream.feed(token)[0] for token in _parts(ids))
    apart = map(difference, logits, subject.encoded(ids)[0])
    return Measured(max(apart), subject.exact, note=f"over {subject.num_unevicted} tokens")


@invariant(
    "a row of a batch gives the same result as alone",
    look_at="data shared by rows: sinks, indices or corrections of one row used for all",
)
def rows(subject: Subject) -> Measured:
    alone = [subject.stream() for _ in range(NUM_ROWS)]

    def singly(token: Tensor) -> Tensor:
        return torch.cat([one.feed(row[None]) for one, row in zip(alone, token, strict=True)])

    tokens = _parts(subject.ids(NUM_ROWS, subject.num_tokens))
    apart = _apart(subject.stream().feed, singly, tokens)
    return Measured(apart, subject.exact, note=f"{NUM_ROWS} rows, {subject.num_tokens} tokens each")


@invariant(
    "tokens fed together, without evictions, equal the same tokens one by one",
    look_at="counts of inputs instead of tokens; sinks that arrive in several inputs",
)
def chunks(subject: Subject) -> Measured:
    """chunks: chunks while nothing is evicted, then single tokens."""
    ids, num_in_parts = subject.ids(2, subject.num_tokens), subject.num_unevicted
    parts = [*_parts(ids[:, :num_in_parts], MOST_AT_ONCE), *_parts(ids[:, num_in_parts:])]
    apart = _apart(subject.stream().feed, subject.stream().feed_singly, parts)
    return Measured(
        apart, subject.exact, note=f"{num_in_parts} tokens in parts of up to {MOST_AT_ONCE}"
    )


@invariant(
    "tokens fed together during evictions equal the same tokens one by one",
    look_at="the entries that the first tokens of an input see: entries evicted by its end, or "
    "later tokens",
)
def evicting_chunks(subject: Subject) -> Measured:
    """evicting_chunks: chunks throughout."""
    subject.needs_eviction()
    stream = subject.stream()
    if isinstance(stream.keeper, FixedSizeCache):
        raise NotApplicableError("a full cache takes one token at a time")
    if not is_exact(stream):
        raise NotApplicableError("by design, tokens of one input see the same older entries")
    parts = _parts(subject.ids(2, subject.num_tokens), MOST_AT_ONCE)
    apart = _apart(stream.feed, subject.stream().feed_singly, parts)
    return Measured(apart, subject.exact, note=f"parts of up to {MOST_AT_ONCE}")


@invariant(
    "rows that are reordered or selected continue unchanged",
    look_at="reorder_cache and batch_select_indices: everything with rows must follow, sinks too",
)
def reorder(subject: Subject) -> Measured:
    order, some = [2, 0, 0], [2, 1]
    worst = _difference_of_rows(
        subject, 3, order, lambda stream: stream.take_rows(order, "reorder_cache")
    )
    worst = max(worst, _difference_of_rows(subject, 3, some, lambda stream: stream.take_rows(some)))
    return Measured(worst, subject.exact)


@invariant(
    "rows that are repeated continue unchanged",
    look_at="batch_repeat_interleave: each row follows itself (0 0 1 1), and sinks too",
)
def repeat(subject: Subject) -> Measured:
    worst = _difference_of_rows(subject, 2, [0, 0, 1, 1], lambda stream: stream.repeat(2))
    return Measured(worst, subject.exact)


@invariant(
    "a stream continues unchanged after it was saved and loaded",
    look_at="the saved state: sinks in their original form, tokens seen, shifts of entries",
)
def save(subject: Subject) -> Measured:
    (before, after), stream = _before_and_after(subject, 2), subject.stream()
    stream.feed_singly(before)
    again = stream.loaded(subject.stream().keeper)
    return Measured(_apart(again.feed, stream.feed, _parts(after)), subject.exact)


def _difference_of_rows(
    subject: Subject, num_rows: int, order: list[int], change: Callable[[Stream], None]
) -> float:
    """Return the difference of rows from a stream that was left alone."""
    before, after = _before_and_after(subject, num_rows)
    stream, same = subject.stream(), subject.stream()
    for one in (stream, same):
        one.feed_singly(before)
    try:
        change(stream)
    except NotImplementedError as error:
        raise NotApplicableError(f"it does not support that: {error}".rstrip(": ")) from error
    except AttributeError as error:
        if error.name not in ("reorder_cache", "batch_select_indices", "batch_repeat_interleave"):
            raise
        raise NotApplicableError(f"it has no {error.name}") from error
    return _apart(
        lambda token: stream.feed(token[order]),
        lambda token: same.feed(token)[order],
        _parts(after),
    )


def _before_and_after(subject: Subject, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the ids for rows before a change and after it."""
    num = subject.capacity + 12 if subject.evicts else max(1, subject.capacity - NUM_AFTER)
    ids = subject.ids(num_rows, num + NUM_AFTER if subject.evicts else subject.capacity)
    return ids[:, :num], ids[:, num:]
