"""A cache after many evictions: its books, and the entries that it holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.aligners import Move
from kvalign.cache import StreamingCache
from kvalign.invariants.base import Invariant, Measured, NotApplicableError, difference
from kvalign.invariants.subject import SAME, Stream, Subject, Watched, first_layer, matches
from kvalign.realign import LONG_RUN, OnRead, Realigner

FIRST_INPUT = 5


@dataclass
class Aged:
    """A stream that is long past its first eviction.

    Attributes:
        fault: entries by which what the cache told and what attention got were apart at most.
        where: the token at which that was, from 0.
        num_sinks: first tokens that were all there after the first eviction; None before it.
        seen: now and then, the tokens [S] that one saw, itself the last; empty where there is no
            telling, which `no_seen` explains.
        hidden: of the same, [N] that the first layer gave.
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


def age(subject: Subject) -> Aged:
    """Feed a stream until entries have been moved back at least once, and keep it."""
    if "aged" not in vars(subject):
        vars(subject)["aged"] = _age(subject)
    return vars(subject)["aged"]


def _age(subject: Subject) -> Aged:
    stream = subject.stream(is_watched=True)
    if stream.watched is None:
        raise NotApplicableError("it encodes anew what it keeps: there is no cache to look at")
    capacity = subject.capacity
    num = 2 * capacity + max(capacity, LONG_RUN) + 16 if subject.evicts else capacity
    if isinstance(stream.cache, StreamingCache):
        while stream.cache.frame.num_behind(num) and num < 4 * (capacity + LONG_RUN):
            num += 1
    ids, done = subject.ids(1, num), 0
    aged = Aged(stream, fault=0, where=0, num_sinks=None, seen=[], hidden=[])
    with first_layer_outputs(subject.model) as outputs:
        while done < num:
            size = min(FIRST_INPUT, capacity) if done == 0 else 1
            stream.feed(ids[:, done : done + size])
            fault = _fault(stream.watched, done, size, done > capacity)
            if fault > aged.fault:
                aged.fault, aged.where = fault, done
            done += size
            if aged.num_sinks is None and stream.num_found < done - size:
                aged.num_sinks = _num_sinks(stream.watched)
            if done > capacity + 1 and done % max(1, capacity // 4) == 0 and not aged.no_seen:
                try:
                    aged.seen.append(stream.seen())
                    aged.hidden.append(outputs[-1][0, -1])
                except NotApplicableError as reason:
                    aged.no_seen = str(reason)
            outputs.clear()
    return aged


@contextmanager
def first_layer_outputs(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """A list that what the first layer gives [B, T, N] is added to."""
    outputs: list[Tensor] = []
    handle = first_layer(model).register_forward_hook(
        lambda module, args, out: outputs.append(out[0] if isinstance(out, tuple) else out)
    )
    try:
        yield outputs
    finally:
        handle.remove()


def _fault(watched: Watched, num_before: int, num_new: int, has_evicted: bool) -> int:
    """Entries by which what the cache told is off."""
    position, faults = watched.positions[-num_new], []
    for layer, (length, offset) in enumerate(watched.told):
        faults.append(abs(length - watched.found[layer][0].shape[2]))
        if not getattr(watched.cache.layers[layer], "is_compileable", False):
            faults.append(abs(offset + length - position - num_new))  # the newest is the last
    if not has_evicted:
        faults.append(abs(position - num_before))
    return max(faults)


def _held(watched: Watched) -> list[int | None]:
    """Which token each entry is of that the last one of the first row found."""
    values = watched.found[0][1][0, :, : watched.num_found]
    return matches(values, watched.born()[1][0, :, :-1])


def _num_sinks(watched: Watched) -> int:
    """How many of the first tokens are all there."""
    held = set(_held(watched))
    return next(n for n in range(len(held) + 1) if n not in held)


def measure_masks(subject: Subject) -> Measured:
    aged = age(subject)
    note = f"first at token {aged.where}" if aged.fault else ""
    return Measured(aged.fault, 0, note)


def measure_positions(subject: Subject) -> Measured:
    context_len = subject.spec.context_len
    if context_len is None:
        raise NotApplicableError("nothing limits this model's positions")
    subject.needs_eviction()
    positions = age(subject).watched.positions
    last = max(positions)
    if last < context_len and positions[-1] == len(positions) - 1:
        note = f"{last} after {len(positions)} tokens: it runs on with the stream"
        return Measured(context_len, context_len - 1, note)
    return Measured(last, context_len - 1, f"over {len(positions)} tokens")


def measure_kept(subject: Subject) -> Measured:
    subject.needs_eviction()
    aged = age(subject)
    watched, cache = aged.watched, aged.stream.cache
    values = watched.found[0][1][0, :, : watched.num_found]
    born = watched.born()[1][0, :, :-1]
    if isinstance(cache, StreamingCache):
        places, which = aged.stream.places(), "entries, as index() names them"
        if aligner_of(cache) is not None:
            places, which = places[: cache.sizes.num_sinks], "sinks; of its other entries see moves"
            if not places:
                raise NotApplicableError(
                    "its aligner changes values, and it has no sinks: see moves"
                )
        apart = (values[:, : len(places)] - born[:, places]).abs().amax((0, 2))
        num_other = int((apart > SAME * born.abs().max()).sum())
        return Measured(num_other, 0, f"{len(places)} {which}")
    held, num_sinks = _held(watched), aged.num_sinks or 0
    known = [place for place in held if place is not None]
    if not known:
        raise NotApplicableError("values are changed, or heads keep different tokens")
    num_wrong = len(held) - len(known) + len(set(range(num_sinks)) - set(known))
    is_ordered = known == sorted(known)
    if subject.spec.family == "alibi" and not is_ordered:  # there an entry's place is its position
        num_wrong += sum(place != at for place, at in zip(known, sorted(known), strict=True))
    newest = range(born.shape[1] - len(held) + num_sinks, born.shape[1])
    note = f"{len(held)} entries: {num_sinks} of the beginning, then "
    note += "the newest" if {*range(num_sinks), *newest} == set(known) else "not all the newest"
    return Measured(num_wrong, 0, note + ("" if is_ordered else ", in another order"))


def aligner_of(cache: StreamingCache) -> Realigner | None:
    """What places a streaming cache's entries, if it is more than rotation."""
    realigner = cache.realigner
    if isinstance(realigner, OnRead):
        return realigner.moving
    return realigner if hasattr(realigner, "aligner") else None


def measure_moves(subject: Subject) -> Measured:
    subject.needs_eviction()
    aged = age(subject)
    cache = aged.stream.cache
    if isinstance(cache, StreamingCache) and (placing := aligner_of(cache)) is not None:
        if placing.recursive:
            raise NotApplicableError(
                "a network moves entries from its own last output: by design its moves do not add "
                "up"
            )
        return _placed_once(aged, cache, placing)
    if subject.spec.family == "learned":
        raise NotApplicableError("entries stay as they were written, stale on learned positions")
    if aged.no_seen:
        raise NotApplicableError(aged.no_seen)
    worst = 0.0
    with torch.no_grad(), first_layer_outputs(subject.model) as outputs:
        for seen, hidden in zip(aged.seen, aged.hidden, strict=True):
            subject.model.base_model(input_ids=seen[None], use_cache=False)
            worst = max(worst, difference(hidden, outputs.pop()[0, -1]))
    num = aged.stream.ids.shape[1]
    return Measured(
        worst, note=f"the first layer and encoded anew, {len(aged.seen)} times in {num} tokens"
    )


@torch.no_grad()
def _placed_once(aged: Aged, cache: StreamingCache, placing: Realigner) -> Measured:
    """Entries as attention sees them, and as one move from their birth makes them."""
    sizes, num = cache.sizes, aged.stream.ids.shape[1]
    behind, index = cache.frame.num_behind(num), cache.index()
    rotation = cache.realigner.rotation if cache.realigner else None
    sinks, window = index.split([sizes.num_sinks, len(index) - sizes.num_sinks])
    at = torch.tensor(aged.watched.positions)
    turns = rotation is not None and cache.realigner is not None and not cache.realigner.moves
    births = torch.tensor([sizes.num_stored(n) for n in range(num)]) if turns else at
    first = sizes.num_sinks + (0 if turns else behind)
    now = torch.arange(first, first + len(window))
    worst = 0.0
    for i, layer in enumerate(cache.layers):
        keys, values = aged.watched.born(i)
        born = keys[:, :, window], values[:, :, window]
        held = placing.anchor(i, *born, births[window], at[window])
        placed = placing.place(i, *held, Move(num, first, now))
        in_front = keys[:, :, sinks], values[:, :, sinks]
        expected = [torch.cat(x, 2) for x in zip(in_front, placed, strict=True)]
        if turns:
            assert rotation is not None
            expected[0] = rotation.shift(expected[0], -behind)
        for found, one in zip((layer.keys, layer.values), expected, strict=True):
            assert found is not None
            worst = max(worst, difference(found, one))
    return Measured(worst, note=f"entries after {num} tokens and placed once, all layers")


MASKS = Invariant(
    about="get_mask_sizes and get_seq_length say what attention gets, in every layer",
    unit="entries off",
    look_at="get_mask_sizes: its length is that of what update returns, its offset makes the "
    "newest key the newest position's",
    measure=measure_masks,
)
POSITIONS = Invariant(
    about="positions stay below the context length however long the stream is",
    unit="position",
    look_at="get_seq_length, which transformers takes for the next token's position",
    measure=measure_positions,
)
KEPT = Invariant(
    about="after many evictions each entry is one token's own, and the sinks are there",
    unit="wrong entries",
    look_at="where sinks are written and what is dropped: entries overwritten, lost or there twice",
    measure=measure_kept,
)
MOVES = Invariant(
    about="moves add up: after many of them entries are as if placed once",
    unit="sd",
    look_at="by how much entries and sinks move at an eviction, and the next token's position",
    measure=measure_moves,
)
