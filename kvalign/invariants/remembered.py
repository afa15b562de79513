"""Invariants of a memory: what it stores, what a step takes back, and that taking everything back
equals dense attention.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from kvalign.aligners import Move
from kvalign.cache.sizes import OF_MEMORY
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.invariants.entries import at_birth
from kvalign.invariants.stream import NotApplicableError, Stream, Watched
from kvalign.invariants.subject import Measured, Subject, difference, invariant, once
from kvalign.memory.memories import Memories
from kvalign.memory.recall import Matches
from kvalign.models.attention import MARK, mark

NUM_ROWS = 2
NUM_TIMES = 8  # that what is taken back is looked at
MOST_LOST = 128  # tokens of the stream after the first eviction: all that is lost is looked through


@dataclass
class AttentionStep:
    """Attention of a step in one layer.

    Attributes:
        query: [B, H, G, D], scaled.
        output: [B, H, G, D].
        matches: the entries that the layer took back.
    """

    query: Tensor
    output: Tensor
    matches: Matches


@dataclass
class Remembered:
    """Stream that has lost some tokens to a memory.

    Attributes:
        apart: largest difference between attention and attention over entries placed from their
            original form.
        where: its token, from 0, and its layer.
        times: number of comparisons.
    """

    cache: StreamingCache
    memories: Memories
    watched: Watched
    apart: float = 0.0
    where: tuple[int, int] = (0, 0)
    times: int = 0


def _with_memory(stream: Stream) -> tuple[StreamingCache, Memories]:
    """The cache of a stream, and its memories."""
    cache = stream.cache
    if not isinstance(cache, StreamingCache) or not isinstance(cache.memory, Memories):
        raise NotApplicableError("it has no memory")
    return cache, cache.memory


@once
def remember(subject: Subject) -> Remembered:
    """Feed a stream token by token, and compare what it takes back."""
    subject.needs_eviction()
    _with_memory(subject.stream())
    stream = subject.stream(is_watched=True)
    (cache, memories), watched = _with_memory(stream), cast(Watched, stream.watched)
    begin = cache.sizes.first_input_len
    num = begin + min(MOST_LOST, 4 * subject.capacity)
    remembered, ids = Remembered(cache, memories, watched), subject.ids(NUM_ROWS, num)
    stream.feed_singly(ids[:, :begin])
    for t in range(begin, num):
        with _record(cache, memories) as steps:
            stream.feed(ids[:, t : t + 1])
        if (num - 1 - t) % max(1, (num - begin) // NUM_TIMES):
            continue
        remembered.times += 1
        for layer, one in steps.items():
            error = difference(one.output, _attention(remembered, layer, one))
            if not error <= remembered.apart:
                remembered.apart, remembered.where = error, (t, layer)
    return remembered


@contextmanager
def _record(cache: StreamingCache, memories: Memories) -> Iterator[dict[int, AttentionStep]]:
    """Record the queries and outputs of each layer for one token."""
    steps: dict[int, AttentionStep] = {}
    update = cache.update

    def listening(keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        entries = update(keys, values, layer, *args, **kwargs)
        if layer not in memories.recall.layer_bias:
            return entries
        read = getattr(entries[0], MARK, None)
        assert read is not None

        def reading(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
            took: list[Matches] = []
            memories.watched = took
            try:
                output = read(query, keys, values, scale)
            finally:
                memories.watched = None
            by_head = keys.shape[1], -1
            steps[layer] = AttentionStep(
                query[:, :, 0].unflatten(1, by_head) * scale,
                output[:, 0].unflatten(1, by_head),
                took[0],
            )
            return output

        mark(entries[0], reading)
        return entries

    cache.update = listening
    try:
        yield steps
    finally:
        cache.update = update


def _attention(remembered: Remembered, layer: int, step: AttentionStep) -> Tensor:
    """Attention [B, H, G, D] over sinks, recalled entries and the window, each placed once from its
    original form.
    """
    cache, recall, watched = remembered.cache, remembered.memories.recall, remembered.watched
    sizes, rotation = cache.sizes, recall.placer.rotation
    num_sinks = sizes.num_sinks
    entries, place = at_birth(cache, watched, layer, recall.placer)
    last, device = len(place) - 1, entries.keys.device
    ages = step.matches.ages[:, :, 0].to(device)
    of_window = torch.arange(sizes.num_in_sight, -1, -1, device=device)
    of_window = of_window.expand(*ages.shape[:2], -1)
    # 1. How far before the token each entry lies, and the place of it.
    beyond = recall.places.near + recall.places.beyond(ages)
    away = torch.cat([beyond.expand_as(ages), of_window], -1)  # [B, H, S]
    at = (place[-1] - away).long()
    if rotation is not None or not recall.places.by_age:
        at = num_sinks + torch.arange(at.shape[-1], device=device)
    # 2. The entries there.
    tokens = last - torch.cat([ages, of_window], -1)
    index = tokens.clamp(0, last)[..., None].expand(*tokens.shape, entries.keys.shape[-1])
    visible = entries.map(lambda x: x.gather(2, index))
    move = Move(0, num_sinks, at)
    keys, values = recall.placer.place_without_rotation(layer, visible, move)
    query = step.query
    if rotation is not None:
        keys = rotation.shift(keys, away.float() - place[-1])
        query = rotation.shift(query, watched.positions[-1] - int(place[-1]))
    sinks = [x[:, :, :num_sinks] for x in watched.originals(layer)]
    keys, values = (torch.cat(x, 2) for x in zip(sinks, (keys, values), strict=True))
    # 3. What attention gives.
    scores = query @ keys.mT
    bias = recall.bias(layer, step.matches)
    if bias is not None:
        scores[..., num_sinks : num_sinks + ages.shape[-1]] += bias.to(device)
    return scores.softmax(-1) @ values


@invariant(
    "a memory stores each evicted entry, up to rounding",
    unit="other entries",
    look_at="the memory's entries: each once, without its position, in the model's precision",
)
def stored(subject: Subject) -> Measured:
    remembered = remember(subject)
    cache, memories = remembered.cache, remembered.memories.of
    placer = remembered.memories.recall.placer
    cache.settle()
    sizes, num = cache.sizes, cache.seen[0]
    first = max(sizes.num_sinks, num - sizes.num_in_sight - sizes.memory)
    num_other = 0
    for layer, memory in memories.items():
        originals, _ = at_birth(cache, remembered.watched, layer, placer)
        read = memory.form.decode_at(memory.written(first, num - first), slice(0))
        for original, actual in zip(originals, read, strict=True):
            original, actual = original[:, :, first:], actual.to(original)
            # A turn by the same angle may differ in the last digit with what is turned beside it.
            same = torch.isclose(original, actual, rtol=1e-5, atol=1e-6)
            if subject.is_int8:
                most = original.abs().amax(-1, keepdim=True)
                same = (original - actual).abs() <= subject.same * most
            num_other += int((~same.all(-1)).sum())
    return Measured(num_other, 0, f"{num - first} tokens, {len(memories)} layers, each head")


@invariant(
    "an entry taken back acts as if it had been computed at its new position",
    unit="sd of attention",
    look_at="the slot, order, row and head of an entry that is taken back, and its new position",
)
def recalled(subject: Subject) -> Measured:
    remembered = remember(subject)
    token, layer = remembered.where
    note = f"{remembered.times} steps, all layers; the most in layer {layer} at token {token}"
    return Measured(remembered.apart, subject.exact, note)


@invariant(
    "a memory with no more entries than are taken back equals a longer window",
    look_at="lost tokens: each token must be either in the window or in the memory",
)
def all_recalled(subject: Subject) -> Measured:
    """When all is recalled, the entries lie side by side: by rank and by age alike."""
    subject.needs_eviction()
    (cache, memories), spec = _with_memory(subject.stream()), subject.spec
    assert spec is not None
    most = cache.sizes.num_recalled
    assert most is not None
    few = replace(cache.sizes, memory=most)
    nothing: dict[str, Any] = dict.fromkeys(OF_MEMORY) | {"memory": 0}
    none = replace(few, **nothing)
    config, num_positions = subject.model.config, memories.recall.places.num_positions
    memory = Memories(spec, few, cache.realigner, config, num_positions)
    of_cache = cache.realigner, cache.bases, config
    with_memory = StreamingCache(spec, few, *of_cache, memory)
    without = StreamingCache(spec, none, cache.realigner, cache.bases)
    without.frame = with_memory.frame
    one, other = (Stream(subject.model, x) for x in (with_memory, without))
    first, *tokens = subject.ids(NUM_ROWS, subject.num_tokens).split(1, 1)
    error = difference(one.feed(first), other.feed(first))
    for one_memory in memory.of.values():
        one_memory.alike = 2  # of all that is lost, nothing is left out for a newer one
    error = max(error, *(difference(one.feed(x), other.feed(x)) for x in tokens))
    return Measured(error, subject.exact, f"{most} of {most} entries, {len(tokens) + 1} tokens")
