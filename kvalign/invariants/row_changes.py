"""Rows that change places, come twice, and come back from a file."""

from collections.abc import Callable

from torch import Tensor

from kvalign.invariants.base import Invariant, Measured, NotApplicableError, difference
from kvalign.invariants.stream import Stream
from kvalign.invariants.subject import Subject

NUM_AFTER = 24  # tokens fed after the change
_LOGITS = "sd of logits"


def measure_reorder(subject: Subject) -> Measured:
    order, some = [2, 0, 0], [2, 1]
    worst = _changed(subject, 3, order, lambda stream: stream.reorder(order))
    return Measured(max(worst, _changed(subject, 3, some, lambda stream: stream.select(some))))


def measure_repeat(subject: Subject) -> Measured:
    return Measured(_changed(subject, 2, [0, 0, 1, 1], lambda stream: stream.repeat(2)))


def measure_save(subject: Subject) -> Measured:
    stream, before, after = _begun(subject, 2)
    stream.feed_singly(before)
    again, worst = stream.loaded(subject.stream().held), 0.0
    for i in range(after.shape[1]):
        token = after[:, i : i + 1]
        worst = max(worst, difference(again.feed(token), stream.feed(token)))
    return Measured(worst)


def _changed(
    subject: Subject, num_rows: int, order: list[int], change: Callable[[Stream], None]
) -> float:
    """What rows are apart from those of a stream that was left alone."""
    stream, before, after = _begun(subject, num_rows)
    same, worst = subject.stream(), 0.0
    for one in (stream, same):
        one.feed_singly(before)
    try:
        change(stream)
    except NotImplementedError as error:
        raise NotApplicableError(f"it does not do that: {error}".rstrip(": ")) from error
    except AttributeError as error:
        if error.name not in ("reorder_cache", "batch_select_indices", "batch_repeat_interleave"):
            raise
        raise NotApplicableError(f"it has no {error.name}") from error
    for i in range(after.shape[1]):
        expected = same.feed(after[:, i : i + 1])[order]
        worst = max(worst, difference(stream.feed(after[order, i : i + 1]), expected))
    return worst


def _begun(subject: Subject, num_rows: int) -> tuple[Stream, Tensor, Tensor]:
    """A stream, what it is fed first, and what after the change."""
    num = subject.capacity + 12 if subject.evicts else max(1, subject.capacity - NUM_AFTER)
    ids = subject.ids(num_rows, num + NUM_AFTER)
    if not subject.evicts:
        ids = ids[:, : subject.capacity]
    return subject.stream(), ids[:, :num], ids[:, num:]


REORDER = Invariant(
    about="rows in another order, or some of them, go on as they were",
    unit=_LOGITS,
    look_at="reorder_cache and batch_select_indices: all that has rows must follow, sinks too",
    measure=measure_reorder,
)
REPEAT = Invariant(
    about="rows that come several times go on as they were",
    unit=_LOGITS,
    look_at="batch_repeat_interleave: each row follows itself (0 0 1 1), and sinks too",
    measure=measure_repeat,
)
SAVE = Invariant(
    about="saved and loaded, a stream goes on as it was",
    unit=_LOGITS,
    look_at="what is saved: sinks as they were computed, tokens seen, by how much entries moved",
    measure=measure_save,
)
