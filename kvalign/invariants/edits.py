"""Invariants of edits: a stream whose tokens were cut, put back or left equals one that was fed the
same tokens as usual.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvalign.aligners import AnchoredAligner
from kvalign.foundation.errors import UserError
from kvalign.invariants.entries import aligner_of, first_layer_outputs
from kvalign.invariants.stream import NotApplicableError
from kvalign.invariants.subject import Measured, Subject, difference, invariant
from kvalign.methods.cached import Cached

NUM_ROWS = 2


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


def _apart(one: Cached, other: Cached, after: Tensor) -> float:
    """Largest difference of the logits of two streams that go on with ids [B, T]."""
    tokens = after.split(1, 1)
    return max(difference(one.feed(token), other.feed(token)) for token in tokens)


@invariant(
    "an edit of nothing, and one that is taken back, leave a stream as it was, bit for bit",
    unit="other numbers",
    look_at="tensors that the edited cache shares with the one before, which undo_edit brings back",
)
def undo(subject: Subject) -> Measured:
    edited, same = _editable(subject), _editable(subject)
    ids, length = subject.ids(NUM_ROWS, subject.num_tokens + 1), _length(subject)
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
    ids = subject.ids(NUM_ROWS, subject.num_tokens)
    edited.feed(ids[:, :num])
    edited.edit(num - length, num)
    plain.feed(ids[:, : num - length])
    apart, note = _apart(edited, plain, ids[:, num:]), f"{length} of {num} tokens"
    has_own_places = subject.family not in ("learned", None)
    if has_own_places and aligner_of(edited.cache) is None:
        nums = [num] if edited.sizes.memory else [num, subject.num_tokens]
        apart = max(apart, *(_first_layer(subject, ids[:, :x]) for x in nums))
        note += "; elsewhere, the first layer and re-encoded"
    return Measured(apart, subject.exact, note)


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
    ids, apart = subject.ids(NUM_ROWS, subject.num_tokens), 0.0
    starts, where = [num - 2 * length, num - length], "in the middle and at the end"
    realigner = aligner_of(_editable(subject).cache)
    if realigner is not None and isinstance(realigner.aligner, AnchoredAligner):
        starts, where = starts[1:], "at the end; what has moved keeps what its network adds"
    for start in starts:
        edited, plain = _editable(subject), _editable(subject)
        for method in (edited, plain):
            method.feed(ids[:, :num])
        edited.edit(start, start + length)
        edited.edit(start, start, ids[:, start : start + length])
        apart = max(apart, _apart(edited, plain, ids[:, num:]))
    return Measured(apart, subject.exact, f"{length} of {num} tokens, {where}")
