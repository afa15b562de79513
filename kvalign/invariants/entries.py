"""Invariants of the entries that a cache stores, and of its reports to transformers: of a stream
long past its first eviction, observed from its first token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.aligners import Move
from kvalign.aligners.entries import KV, cat
from kvalign.cache.realigner import LONG_RUN, OnRead, Realigner, rotated
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.invariants.stream import NotApplicableError, Stream, Watched
from kvalign.invariants.subject import Measured, Subject, difference, first_layer, invariant, once

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
    watched: Watched
    fault: int = 0
    where: int = 0
    num_sinks: int | None = None
    seen: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    no_seen: str = ""


@once
def age(subject: Subject) -> Aged:
    """Feed a stream until entries have been moved back at least once, and keep it."""
    stream = subject.stream(is_watched=True)
    if stream.watched is None:
        raise NotApplicableError("it re-encodes the kept tokens: there is no cache to look at")
    capacity = subject.capacity
    num = 2 * capacity + max(capacity, LONG_RUN) + 16 if subject.evicts else capacity
    if isinstance(stream.cache, StreamingCache):
        while stream.cache.frame.num_behind(num) > stream.cache.frame.lift and num < 4 * (
            capacity + LONG_RUN
        ):
            num += 1
    ids, num_fed = subject.ids(1, num), 0
    aged = Aged(stream, stream.watched)
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


def _num_sinks(watched: Watched) -> int:
    """Return how many of the first tokens are all present; 0 if that is unknown."""
    try:
        tokens = set(watched.tokens())
    except NotApplicableError:
        return 0
    return next(n for n in range(len(tokens) + 1) if n not in tokens)


@invariant(
    "get_mask_sizes and get_seq_length agree with the entries that attention gets, in every layer",
    unit="entries off",
    look_at="get_mask_sizes: its length must be that of the entries that update returns, its "
    "offset must give the newest key the newest position",
)
def masks(subject: Subject) -> Measured:
    aged = age(subject)
    return Measured(aged.fault, 0, f"first at token {aged.where}" if aged.fault else "")


@invariant(
    "positions stay below the context length however long the stream is",
    unit="position",
    look_at="get_seq_length, from which transformers takes the next token's position",
)
def positions(subject: Subject) -> Measured:
    context_len = subject.context_len
    if context_len is None:
        raise NotApplicableError("nothing limits this model's positions")
    subject.needs_eviction()
    positions = age(subject).watched.positions
    last = max(positions)
    if last < context_len and positions[-1] == len(positions) - 1:
        note = f"{last} after {len(positions)} tokens: it runs on, to {context_len} and beyond"
        return Measured(context_len, context_len - 1, note)
    return Measured(last, context_len - 1, f"over {len(positions)} tokens")


@invariant(
    "after many evictions each entry belongs to one token, and the sinks are there",
    unit="wrong entries",
    look_at="the writing of sinks and the eviction: entries overwritten, lost or duplicated",
)
def kept(subject: Subject) -> Measured:
    subject.needs_eviction()
    aged = age(subject)
    watched, cache = aged.watched, aged.stream.cache
    values = watched.entries[0][1][0, :, : watched.num_read]
    originals = watched.originals()[1][0, :, :-1]
    if isinstance(cache, StreamingCache):
        tokens, which = aged.stream.tokens(), "entries, as index() reports them"
        if aligner_of(cache) is not None:
            tokens = tokens[: cache.sizes.num_sinks]
            which = "sinks; for its other entries see moves"
            if not tokens:
                raise NotApplicableError("its aligner changes values, without sinks: see moves")
        errors = (values[:, : len(tokens)] - originals[:, tokens]).abs().amax((0, 2))
        num_other = int((errors > subject.same * originals.abs().max()).sum())
        return Measured(num_other, 0, f"{len(tokens)} {which}")
    by_entry, num_sinks = watched.tokens(), aged.num_sinks or 0
    tokens = [token for token in by_entry if token is not None]
    if not tokens:
        raise NotApplicableError("values are changed")
    num_wrong = len(by_entry) - len(tokens) + len(set(range(num_sinks)) - set(tokens))
    is_ordered = tokens == sorted(tokens)
    if subject.family == "alibi" and not is_ordered:  # there an entry's place is its position
        num_wrong += sum(token != at for token, at in zip(tokens, sorted(tokens), strict=True))
    newest = range(originals.shape[1] - len(by_entry) + num_sinks, originals.shape[1])
    note = f"{len(by_entry)} entries: {num_sinks} from the beginning, then "
    note += "the newest" if {*range(num_sinks), *newest} == set(tokens) else "not all the newest"
    return Measured(num_wrong, 0, note + ("" if is_ordered else ", in another order"))


def aligner_of(cache: StreamingCache) -> Realigner | None:
    """Return the aligner of a streaming cache's entries, if there is more than rotation."""
    realigner = cache.realigner
    if isinstance(realigner, OnRead):
        return realigner.moving
    return realigner if realigner.aligner is not None else None


@invariant(
    "moves add up: after many moves entries equal those placed once",
    unit="sd",
    look_at="the number of positions that entries and sinks move at an eviction, and the next "
    "token's position",
)
def moves(subject: Subject) -> Measured:
    subject.needs_eviction()
    aged = age(subject)
    cache = aged.stream.cache
    if isinstance(cache, StreamingCache) and (placing := aligner_of(cache)) is not None:
        aged.stream.tokens()  # which are the same in all layers and heads
        if placing.recursive:
            raise NotApplicableError("a network moves entries from its own last output")
        return _placed_once(subject, aged, cache, placing)
    if subject.family is None:
        raise NotApplicableError("the position encoding of this model is unknown")
    if subject.family == "learned":
        raise NotApplicableError("entries keep their original form, stale on learned positions")
    if subject.spec and subject.spec.states:
        raise NotApplicableError("its states have seen evicted tokens")
    if aged.no_seen:
        raise NotApplicableError(aged.no_seen)
    worst = 0.0
    with torch.no_grad(), first_layer_outputs(subject.model) as outputs:
        for seen, hidden in zip(aged.seen, aged.hidden, strict=True):
            subject.model.base_model(input_ids=seen[None], use_cache=False)
            worst = max(worst, difference(hidden, outputs.pop()[0, -1]))
    num = aged.stream.ids.shape[1]
    note = f"the first layer and re-encoded, {len(aged.seen)} times in {num} tokens"
    return Measured(worst, subject.exact, note)


def at_birth(
    cache: StreamingCache, watched: Watched, layer: int, placing: Realigner
) -> tuple[KV, Tensor]:
    """Entries [B, H, N, D] of all tokens without their position, and the original place [N] of
    each.
    """
    at, sizes = torch.tensor(watched.positions), cache.sizes
    place = at
    if cache.realigner.runs_on:
        place = torch.tensor([sizes.num_stored(n) for n in range(len(at))])
    evicting = (torch.arange(len(at)) >= sizes.first_input_len)[None]
    return placing.anchor(layer, watched.originals(layer), place, at, evicting), place


@torch.no_grad()
def _placed_once(
    subject: Subject, aged: Aged, cache: StreamingCache, placing: Realigner
) -> Measured:
    """Entries as attention sees them, and the same after one move from their original form."""
    sizes, num = cache.sizes, aged.stream.ids.shape[1]
    behind, index = cache.frame.num_behind(num), cache.index()
    rotation = cache.realigner.rotation
    sinks, window = index.split([sizes.num_sinks, len(index) - sizes.num_sinks])
    rotates, worst = cache.realigner.runs_on, 0.0
    first = sizes.num_sinks + (0 if rotates else behind)
    now = torch.arange(first, first + len(window))
    for layer in cache.attention:
        i = layer.layer_idx
        entries, _ = at_birth(cache, aged.watched, i, placing)
        placed = placing.place(i, entries.at(window), Move(num, first, now))
        expected = cat([aged.watched.originals(i).at(sinks), placed])
        if rotates:
            expected = rotated(rotation, i, expected, -behind)
        for actual, one in zip((layer.keys, layer.values), expected, strict=True):
            assert actual is not None
            worst = max(worst, difference(actual, one))
    note = f"entries after {num} tokens and entries placed once, all layers"
    return Measured(worst, subject.exact, note)
