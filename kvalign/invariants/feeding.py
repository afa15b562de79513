"""Invariants of feeding: the result does not depend on how tokens are fed, nor on rows that change
places, occur twice, or come back from a file; nor on tokens that an edit has cut, put back or left.
"""

import random
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from kvalign.cache.streaming_cache import StreamingCache
from kvalign.foundation.errors import UserError
from kvalign.invariants.entries import aligner_of, first_layer_outputs
from kvalign.invariants.stream import NotApplicableError, Stream
from kvalign.invariants.subject import Measured, Subject, difference, invariant
from kvalign.methods.cached import Cached

NUM_ROWS, EDITED_ROWS = 3, 2
MOST_AT_ONCE = 7
NUM_AFTER = 24  # tokens fed after a change of rows

Feed = Callable[[Tensor], Tensor]
RowChange = tuple[list[int], Callable[[Stream], None]]
"""Rows by their numbers before, and what makes a stream one of these rows."""


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
    errors = map(difference, logits, subject.encoded(ids)[0])
    return Measured(max(errors), subject.exact, note=f"over {subject.num_unevicted} tokens")


@invariant(
    "a row of a batch gives the same result as alone",
    look_at="data shared by rows: sinks, indices or corrections of one row used for all",
)
def rows(subject: Subject) -> Measured:
    alone = [subject.stream() for _ in range(NUM_ROWS)]

    def singly(token: Tensor) -> Tensor:
        return torch.cat([one.feed(row[None]) for one, row in zip(alone, token, strict=True)])

    tokens = _parts(subject.ids(NUM_ROWS, subject.num_tokens))
    error = _apart(subject.stream().feed, singly, tokens)
    return Measured(error, subject.exact, note=f"{NUM_ROWS} rows, {subject.num_tokens} tokens each")


@invariant(
    "tokens fed together, without evictions, equal the same tokens one by one",
    look_at="counts of inputs instead of tokens; sinks that arrive in several inputs",
)
def chunks(subject: Subject) -> Measured:
    """chunks: chunks while nothing is evicted, then single tokens."""
    ids, num_in_parts = subject.ids(2, subject.num_tokens), subject.num_unevicted
    parts = [*_parts(ids[:, :num_in_parts], MOST_AT_ONCE), *_parts(ids[:, num_in_parts:])]
    error = _apart(subject.stream().feed, subject.stream().feed_singly, parts)
    return Measured(
        error, subject.exact, note=f"{num_in_parts} tokens in parts of up to {MOST_AT_ONCE}"
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
    if isinstance(stream.keeper, StreamingCache):
        raise NotApplicableError("a full cache takes one token at a time")
    if isinstance(stream.keeper, Cached) and not stream.keeper.is_exact:
        raise NotApplicableError("by design, tokens of one input see the same older entries")
    parts = _parts(subject.ids(2, subject.num_tokens), MOST_AT_ONCE)
    error = _apart(stream.feed, subject.stream().feed_singly, parts)
    return Measured(error, subject.exact, note=f"parts of up to {MOST_AT_ONCE}")


@invariant(
    "rows that are reordered or selected continue unchanged",
    look_at="reorder_cache and batch_select_indices: everything with rows must follow, sinks too",
)
def reorder(subject: Subject) -> Measured:
    order, some = [2, 0, 0], [2, 1]
    ways: list[RowChange] = [
        (order, lambda stream: stream.take_rows(order, "reorder_cache")),
        (some, lambda stream: stream.take_rows(some)),
    ]
    return Measured(_difference_of_rows(subject, 3, *ways), subject.exact)


@invariant(
    "rows that are repeated continue unchanged",
    look_at="batch_repeat_interleave: each row follows itself (0 0 1 1), and sinks too",
)
def repeat(subject: Subject) -> Measured:
    twice = [0, 0, 1, 1], lambda stream: stream.repeat(2)
    return Measured(_difference_of_rows(subject, 2, twice), subject.exact)


@invariant(
    "a stream continues unchanged after it was saved and loaded",
    look_at="the saved state: sinks in their original form, tokens seen, shifts of entries",
)
def save(subject: Subject) -> Measured:
    (before, after), stream = _before_and_after(subject, 2), subject.stream()
    stream.feed_singly(before)
    again = stream.loaded(subject.stream().keeper)
    return Measured(_apart(again.feed, stream.feed, _parts(after)), subject.exact)


def _difference_of_rows(subject: Subject, num_rows: int, *ways: RowChange) -> float:
    """Return the difference of rows that were changed, in one way or another, from those of a
    stream that was left alone.
    """
    before, after = _before_and_after(subject, num_rows)
    streams = [subject.stream() for _ in (None, *ways)]
    for one in streams:
        one.feed_singly(before)
    same, *changed = streams
    for stream, (_, change) in zip(changed, ways, strict=True):
        try:
            change(stream)
        except NotImplementedError as error:
            raise NotApplicableError(f"it does not support that: {error}".rstrip(": ")) from error
        except AttributeError as error:
            names = ("reorder_cache", "batch_select_indices", "batch_repeat_interleave")
            if error.name not in names:
                raise
            raise NotApplicableError(f"it has no {error.name}") from error
    worst = 0.0
    for token in _parts(after):
        expected = same.feed(token)
        for stream, (order, _) in zip(changed, ways, strict=True):
            worst = max(worst, difference(stream.feed(token[order]), expected[order]))
    return worst


def _before_and_after(subject: Subject, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the ids for rows before a change and after it."""
    num = subject.capacity + 12 if subject.evicts else max(1, subject.capacity - NUM_AFTER)
    ids = subject.ids(num_rows, num + NUM_AFTER if subject.evicts else subject.capacity)
    return ids[:, :num], ids[:, num:]


def _editable(subject: Subject) -> Cached:
    """Method whose streams can be edited, and that was fed nothing."""
    method = subject.stream().method
    if method is None:
        raise NotApplicableError("a cache alone is not edited: make_method makes what is")
    try:
        method.edit(0, 0)
    except UserError as reason:
        raise NotApplicableError(str(reason)) from reason
    assert isinstance(method, Cached)
    return method


def _length(subject: Subject) -> int:
    """Tokens of an edit: a third of what the cache keeps."""
    return subject.capacity // 3


@invariant(
    "an edit of nothing, and one that is taken back, leave a stream as it was, bit for bit",
    unit="other numbers",
    look_at="tensors that the edited cache shares with the one before, which undo_edit brings back",
)
def undo(subject: Subject) -> Measured:
    edited, same = _editable(subject), _editable(subject)
    ids, length = subject.ids(EDITED_ROWS, subject.num_tokens + 1), _length(subject)
    num_other = 0
    for num in (subject.capacity, subject.num_tokens):
        for start, stop, new in (
            (num, num, []),
            (num - 2 * length, num - length, []),
            (num - length, num - length, [ids[:, :length]]),
            (num - length, num, [ids[:, : length + 1]]),
        ):
            edited.reset()
            same.reset()
            for method in (edited, same):
                method.feed(ids[:, :num])
            edited.edit(start, stop, *new)
            if start < stop or new:
                edited.undo_edit()
            num_other += sum(_num_other(*pair) for pair in _states(edited, same))
            last = ids[:, num : num + 1]
            num_other += _num_other(edited.feed(last), same.feed(last))
    return Measured(num_other, 0, f"{length} tokens, before and after evictions")


def _states(one: Cached, other: Cached) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors of the same name in two saved states."""
    mine, others = one.state(), other.state()
    for name in {**mine, **others}:
        yield tuple(x.get(name, torch.zeros(0)) for x in (mine, others))  # type: ignore[misc]


def _num_other(one: Tensor, other: Tensor) -> int:
    if one.shape != other.shape:
        return max(one.numel(), other.numel())
    return int((one != other).sum())


@invariant(
    "tokens that are cut at the end were never read; those cut elsewhere are gone from the first "
    "layer, and what stands behind them is at its new place",
    look_at="the entries that an edit takes over, and the places by which it moves those behind it",
)
def cut(subject: Subject) -> Measured:
    edited, plain = _editable(subject), _editable(subject)
    num, length = subject.capacity, _length(subject)
    ids = subject.ids(EDITED_ROWS, subject.num_tokens)
    edited.feed(ids[:, :num])
    edited.edit(num - length, num)
    plain.feed(ids[:, : num - length])
    error, note = _apart(edited.feed, plain.feed, _parts(ids[:, num:])), f"{length} of {num} tokens"
    has_own_places = subject.family not in ("learned", None)
    if has_own_places and aligner_of(edited.cache) is None:
        nums = [num] if edited.sizes.memory else [num, subject.num_tokens]
        error = max(error, *(_first_layer(subject, ids[:, :x]) for x in nums))
        note += "; elsewhere, the first layer and re-encoded"
    return Measured(error, subject.exact, note)


@torch.no_grad()
def _first_layer(subject: Subject, ids: Tensor) -> float:
    """Difference of the first layer's output after a cut from that of the kept tokens alone."""
    method, num, length = _editable(subject), ids.shape[1], _length(subject)
    method.feed(ids)
    start, stop = num - 2 * length, num - length
    method.edit(start, stop)
    rest, last = torch.cat([ids[:, :start], ids[:, stop:]], 1), ids[:, :1]
    context = torch.cat([rest[:, method.cache.index().to(ids.device)], last], 1)
    with first_layer_outputs(subject.model) as outputs:
        method.feed(last)
        subject.model.base_model(input_ids=context, use_cache=False)
        return difference(*(hidden[:, -1] for hidden in outputs))


@invariant(
    "tokens that are cut and put back at the same place leave a stream as it was",
    look_at="entries that move there and back: each must move from where it was read, and what is "
    "put back must see what stands before it, at its own places",
)
def put_back(subject: Subject) -> Measured:
    """put-back: while nothing has been evicted, so that all tokens see the same ones."""
    num, length = subject.capacity, _length(subject)
    ids, error = subject.ids(EDITED_ROWS, subject.num_tokens), 0.0
    for start in (num - 2 * length, num - length):
        edited, plain = _editable(subject), _editable(subject)
        for method in (edited, plain):
            method.feed(ids[:, :num])
        edited.edit(start, start + length)
        edited.edit(start, start, ids[:, start : start + length])
        error = max(error, _apart(edited.feed, plain.feed, _parts(ids[:, num:])))
    return Measured(error, subject.exact, f"{length} of {num} tokens, in the middle and at the end")
