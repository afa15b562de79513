"""However tokens are fed, the same comes out."""

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from kvalign.invariants.base import Invariant, Measured, NotApplicableError, difference
from kvalign.invariants.stream import Stream, is_exact
from kvalign.invariants.subject import Subject

NUM_ROWS = 3
MOST_AT_ONCE = 7
_LOGITS = "sd of logits"


def measure_dense(subject: Subject) -> Measured:
    num = subject.capacity + 1 if subject.evicts else subject.capacity
    ids = subject.ids(1, num)
    expected, stream = subject.encoded(ids)[0], subject.stream()
    apart = [difference(stream.feed(ids[:, i : i + 1])[0], expected[i]) for i in range(num)]
    return Measured(max(apart), note=f"over {num} tokens")


def measure_rows(subject: Subject) -> Measured:
    ids, together = subject.ids(NUM_ROWS, subject.num_tokens), subject.stream()
    alone, worst = [subject.stream() for _ in range(NUM_ROWS)], 0.0
    for i in range(subject.num_tokens):
        expected = torch.cat([one.feed(ids[row, None, i : i + 1]) for row, one in enumerate(alone)])
        worst = max(worst, difference(together.feed(ids[:, i : i + 1]), expected))
    return Measured(worst, note=f"{NUM_ROWS} rows, {subject.num_tokens} tokens each")


def measure_chunks(subject: Subject) -> Measured:
    """Parts while nothing is evicted, then single tokens."""
    num_in_parts = subject.capacity + 1 if subject.evicts else subject.capacity
    ids = subject.ids(2, subject.num_tokens)
    stream, singly = subject.stream(), subject.stream()
    worst = _apart(stream, singly, ids[:, :num_in_parts])
    for i in range(num_in_parts, subject.num_tokens):
        one = ids[:, i : i + 1]
        worst = max(worst, difference(stream.feed(one), singly.feed(one)))
    return Measured(worst, note=f"{num_in_parts} tokens in parts of up to {MOST_AT_ONCE}")


def measure_evicting_chunks(subject: Subject) -> Measured:
    """Parts all the way."""
    subject.needs_eviction()
    stream, singly = subject.stream(), subject.stream()
    if not is_exact(stream):
        raise NotApplicableError("by design, tokens of one input see what those before them saw")
    ids = subject.ids(2, subject.num_tokens)
    return Measured(_apart(stream, singly, ids), note=f"parts of up to {MOST_AT_ONCE}")


def _apart(stream: Stream, singly: Stream, ids: Tensor) -> float:
    worst = 0.0
    for part in _parts(ids):
        worst = max(worst, difference(stream.feed(part), singly.feed_singly(part)))
    return worst


def _parts(ids: Tensor) -> Iterator[Tensor]:
    rng, start = random.Random(0), 0
    while start < ids.shape[1]:
        end = start + rng.randint(1, MOST_AT_ONCE)
        yield ids[:, start:end]
        start = end


DENSE = Invariant(
    about="while nothing is evicted it is the model without a cache",
    unit=_LOGITS,
    look_at="what update returns of the entries before the first eviction, and their number",
    measure=measure_dense,
)
ROWS = Invariant(
    about="a row of a batch is what it is alone",
    unit=_LOGITS,
    look_at="what is shared by rows: sinks, indices and corrections taken of one row for all",
    measure=measure_rows,
)
CHUNKS = Invariant(
    about="tokens fed together, nothing evicted, are the same tokens one by one",
    unit=_LOGITS,
    look_at="what is counted by inputs where tokens are meant; sinks that come in several inputs",
    measure=measure_chunks,
)
EVICTING_CHUNKS = Invariant(
    about="tokens fed together while entries are evicted are the same tokens one by one",
    unit=_LOGITS,
    look_at="what the first tokens of an input see: what is evicted by its end, or its later ones",
    measure=measure_evicting_chunks,
)
