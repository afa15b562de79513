"""The cache against a list of tokens, for any sizes, rows and sequence of inputs.

No model: a fake key tells which token it is, in which stream and layer, and at what position it
stands; a fake realigner rewrites the position alone. So what attention gets must be the tokens of
the list, each at its position.
"""

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvalign.aligners.entries import KV
from kvalign.cache.on_read import OnRead
from kvalign.cache.realign import FromBirth, Recursive, Returning, Rotating
from kvalign.cache.realigner import Realigner
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.invariants.stream import by_time
from kvalign.models.architectures import ModelSpec
from kvalign.models.rope import Rotation

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 2, 3
# A key is token * _TOKEN + position + what marks stream, layer, head and target: whole numbers that
# float32 holds exactly (below 2^24).
_HEAD, _LAYER, _STREAM, _TOKEN, _TARGET = 2**6, 2**7, 2**8, 2**11, 2**22
MAX_POSITION, MAX_STREAMS = _HEAD - 1, _TOKEN // _STREAM
SPEC = ModelSpec("fake", "gpt2", "learned", NUM_LAYERS, NUM_HEADS, HEAD_DIM, MAX_POSITION + 1)


class Turn(Rotation):
    """A rotation that subtracts."""

    def __init__(self):
        super().__init__(torch.zeros(0))

    def shift(self, keys, shift):
        return keys - torch.as_tensor(shift)[..., None]


def column(at):
    return (torch.arange(at.start, at.stop) if isinstance(at, slice) else at)[:, None]


class FakeRotating(Rotating):
    def __init__(self, run):
        super().__init__(Turn())
        self.run = run

    def within(self, sizes, context_len):
        return self

    def frame(self, sizes, context_len):
        return replace(sizes, realign_every=self.run)


class FakeFromBirth(FromBirth):
    def __init__(self, rotation):
        Realigner.__init__(self, rotation)

    def anchor(self, layer, new, birth, at, evicting=False):
        return KV(new.keys - column(at), new.values - column(birth))

    def place(self, layer, stored, move):
        return stored.map(lambda x: x + move.now[:, None])


class FakeRecursive(Recursive):
    def __init__(self, rotation):
        Realigner.__init__(self, rotation)

    def place(self, layer, stored, move):
        return stored.map(lambda x: x - move.shift)


class FakeOnRead(OnRead):
    def describe(self, step, decode):
        return decode

    def __init__(self, rotation, run):
        Realigner.__init__(self, rotation)
        self.config, self.run = SimpleNamespace(_attn_implementation="kvalign_fake"), run

    def within(self, sizes, context_len):
        return self

    def frame(self, sizes, context_len):
        return replace(sizes, realign_every=self.run) if self.rotation else sizes

    def anchor(self, layer, new, birth, at, evicting=False):
        keys = new.keys if self.rotation else new.keys - column(birth)
        return KV(keys, new.values - column(birth))

    def prepare(self, num_layers):
        """There is no table."""

    def read(self, layer, stored, now, at):
        keys = stored.keys if self.rotation else stored.keys + now[:, None]
        return KV(keys, stored.values + now[:, None])


def make_realigner(kind, run):
    family, _, rotation = kind.partition(" ")
    turn = Turn() if rotation else None
    return {
        "none": lambda: None,
        "rotating": lambda: FakeRotating(run),
        "returning": lambda: Returning(turn),
        "from-birth": lambda: FakeFromBirth(turn),
        "recursive": lambda: FakeRecursive(turn),
        "on-read": lambda: FakeOnRead(turn, run),
    }[family]()


KINDS = (
    "none",
    "rotating rotary",
    "returning rotary",
    "from-birth",
    "from-birth rotary",
    "recursive",
    "recursive rotary",
    "on-read",
    "on-read rotary",
)
BY_PLACE = ("rotating rotary", "returning rotary", "on-read rotary")  # values are not rotated
EXACT = ("none", "rotating", "returning", "on-read")  # those that take segments


@dataclass
class Entry:
    """A token of a stream, and the positions that its key and value have now."""

    token: int
    key: int
    value: int


class Stream:
    """What a row of the cache must hold, one token at a time.

    Args:
        kind: of `KINDS`.
        every: evicted entries after which those that stay are moved.
        mark: what tells it from other streams.
    """

    def __init__(self, kind: str, sizes: CacheSizes, every: int, mark: int):
        self.kind, self.sizes, self.mark = kind, sizes, mark
        self.rotates = kind.endswith("rotary")
        self.every = -(-every // sizes.num_evicted) * sizes.num_evicted
        self.entries: list[Entry] = []
        self.seen = self.dropped = self.moved = 0

    @property
    def behind(self) -> int:
        return self.dropped - self.moved

    def take(self, num: int, at_once: bool = False) -> list[Entry]:
        """Add so many tokens, all before anything is dropped or one by one; return them as new."""
        new = []
        for _ in range(num):
            position = self.seen - self.moved
            value = len(self.entries) if self.kind in BY_PLACE else position
            self.entries.append(Entry(self.seen, position, value))
            new.append(copy.copy(self.entries[-1]))
            self.seen += 1
            if not at_once:
                self.evict()
        self.evict()
        return new

    def evict(self) -> None:
        num_sinks, num_evicted = self.sizes.num_sinks, self.sizes.num_evicted
        while len(self.entries) > self.sizes.cache_size:
            del self.entries[num_sinks : num_sinks + num_evicted]
            self.dropped += num_evicted
            if self.behind == self.every:
                for entry in self.entries[num_sinks:]:
                    self.move(entry)
                self.moved = self.dropped

    def move(self, entry: Entry) -> None:
        if self.kind == "none":
            return
        entry.key -= self.behind
        if self.kind not in BY_PLACE:
            entry.value -= self.behind

    def found(self) -> list[Entry]:
        """The entries as attention sees them."""
        found = [copy.copy(entry) for entry in self.entries]
        for place, entry in enumerate(found):
            if place < self.sizes.num_sinks:
                entry.key = place + (self.behind if self.rotates else 0)
                entry.value = place
            elif self.kind == "on-read rotary":
                entry.value = place
        return found

    def stored(self, entries: list[Entry]) -> list[Entry]:
        """Some of `found` and of new ones as they are kept: by `OnRead` without their place."""
        if not self.kind.startswith("on-read"):
            return entries
        is_sink = [entry.token < self.sizes.num_sinks for entry in entries]
        return [
            entry if sink else replace(entry, key=entry.key if self.rotates else 0, value=0)
            for entry, sink in zip(entries, is_sink, strict=True)
        ]

    def fake(self, layer: int, entries: list[Entry]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [H, S, D] of these entries."""
        base = self.mark * _STREAM + layer * _LAYER + torch.arange(NUM_HEADS)[:, None] * _HEAD
        keys, values = (
            base + torch.tensor([e.token * _TOKEN + getattr(e, kv) for e in entries])
            for kv in ("key", "value")
        )
        shape = (NUM_HEADS, len(entries), HEAD_DIM)
        return tuple(x[..., None].expand(shape).float() for x in (keys, values + _TARGET))


class CacheMachine(RuleBasedStateMachine):
    """Feeds, resets, selects and joins rows in any order."""

    @initialize(
        num_sinks=st.integers(0, 5),
        window=st.integers(1, 12),
        data=st.data(),
        num_rows=st.integers(1, 3),
        kind=st.sampled_from(KINDS),
        realign_every=st.integers(1, 5),
    )
    def begin(self, num_sinks, window, data, num_rows, kind, realign_every):
        num_evicted = data.draw(st.integers(1, window), label="num_evicted")
        self.kind = kind
        self.sizes = CacheSizes(num_sinks + window, num_sinks, num_evicted, realign_every)
        self.every = realign_every
        if kind in ("rotating rotary", "on-read rotary"):
            room = MAX_POSITION - self.sizes.cache_size
            self.every = data.draw(st.integers(1, room), label="frame")
        elif kind == "returning rotary":
            self.every = 1
        self.realigner = make_realigner(kind, self.every)
        self.num_streams = 0
        self.num_rows = num_rows
        self.cache, self.rows = self.new_cache(), self.new_rows(num_rows)

    def new_cache(self):
        return StreamingCache(SPEC, self.sizes, self.realigner)

    def new_rows(self, num_rows):
        self.num_streams += num_rows
        marks = range(self.num_streams - num_rows, self.num_streams)
        return [Stream(self.kind, self.sizes, self.every, i % MAX_STREAMS) for i in marks]

    @property
    def is_even(self):
        return len({row.seen for row in self.rows}) == 1

    @rule()
    def feed_one(self):
        self.feed(self.cache, self.rows, 1)

    @precondition(lambda self: self.is_even)
    @rule(data=st.data())
    def feed_several(self, data):
        position = self.rows[0].seen - self.rows[0].moved
        room = min(MAX_POSITION + 1 - position, self.sizes.first_input_len)
        if room > 0:
            self.feed(self.cache, self.rows, data.draw(st.integers(1, room), label="tokens"))

    def feed(self, cache, rows, length):
        found = [row.found() for row in rows]
        new = [row.take(length, at_once=True) for row in rows]
        width = max(map(len, found)) + length
        assert cache.get_mask_sizes(length, 0)[0] == width
        # Several tokens at once are for a method, which begins the pass.
        with cache.forward_pass(len(rows), length) if length > 1 else nullcontext():
            for layer in range(NUM_LAYERS):
                given = batch(row.fake(layer, some) for row, some in zip(rows, new, strict=True))
                got = KV(*cache.update(*given, layer))
                if step := cache.step or cache.last_step:
                    got = by_time(step, got)
                for i, row in enumerate(rows):
                    expected = found[i] + new[i]
                    if length == 1:
                        expected = row.stored(expected)
                        assert got[0].shape[2] == width
                    assert_last(got, i, row.fake(layer, expected))

    @precondition(lambda self: self.is_even and self.kind.split()[0] in EXACT)
    @rule(data=st.data())
    def feed_segment(self, data):
        """Each token is computed at its own place; in the cache it is where stepping leaves it."""
        length = data.draw(st.integers(1, 2 * self.sizes.cache_size + 3), label="tokens")
        moved = self.rows[0].moved
        found = [row.stored(row.found()) for row in self.rows]
        sinks = range(self.sizes.num_sinks)
        for entry in (entry for some in found for entry in some if entry.token in sinks):
            entry.key = entry.token  # they lie where each query finds them
        new = [row.take(length) for row in self.rows]
        segment = self.cache.segment(length, torch.device("cpu"))
        with self.cache.forward_pass(len(self.rows), length, segment):
            for layer in range(NUM_LAYERS):
                self.take_segment(layer, found, new, moved)

    def take_segment(self, layer, found, new, moved):
        given, expected = [], []
        for row, some, before in zip(self.rows, new, found, strict=True):
            births = [entry.key for entry in some]
            if row.rotates:  # computed at its place, turned to where it would run on
                births = [entry.value for entry in some]
                some = [replace(entry, key=entry.token - moved) for entry in some]
            computed = [replace(e, key=birth) for e, birth in zip(some, births, strict=True)]
            given.append(row.fake(layer, computed))
            expected.append(row.fake(layer, before + row.stored(some)))
        got = self.cache.update(*batch(given), layer)
        for i, one in enumerate(expected):
            assert got[0].shape[2] == one[0].shape[1]
            assert_last(got, i, one)

    @rule()
    def reset(self):
        self.cache.reset()
        self.rows = self.new_rows(len(self.rows))
        assert self.cache.num_evictions == self.cache.num_stored == 0 and self.cache.seen == []
        assert self.cache.index().tolist() == []

    @precondition(lambda self: self.rows[0].seen)
    @rule(data=st.data())
    def select_rows(self, data):
        choice = st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=4)
        chosen = data.draw(choice, label="rows")
        self.cache.batch_select_indices(torch.tensor(chosen))
        self.rows = [copy.deepcopy(self.rows[i]) for i in chosen]

    @precondition(lambda self: self.rows[0].seen and len(self.rows) == 1)
    @rule(repeats=st.integers(1, 3))
    def repeat_rows(self, repeats):
        self.cache.batch_repeat_interleave(repeats)
        self.rows = [copy.deepcopy(self.rows[0]) for _ in range(repeats)]

    @precondition(lambda self: len(self.rows) <= 3)
    @rule(parts=st.lists(st.integers(1, 12), min_size=1, max_size=3), num_rows=st.integers(1, 2))
    def join_rows(self, parts, num_rows):
        """Rows of another cache; before this one has been fed anything they are all there is."""
        other, rows = self.new_cache(), self.new_rows(num_rows)
        for length in parts:
            self.feed(other, rows, min(length, self.sizes.first_input_len))
        self.rows = [*(self.rows if self.rows[0].seen else []), *rows]
        self.cache.join([other])

    @rule()
    def look_at_each_row(self):
        """As others see it who select it alone."""
        for i, row in enumerate(self.rows):
            if row.seen:
                alone = copy.deepcopy(self.cache)
                alone.select([i])
                check_held(alone, [row])

    @invariant()
    def cache_is_the_list(self):
        cache, rows = self.cache, self.rows
        if not rows[0].seen:
            return
        assert cache.seen == [row.seen for row in rows]
        assert cache.positions() == [row.seen - row.moved for row in rows]
        assert cache.num_stored == max(len(row.entries) for row in rows)
        dropped = max(row.dropped for row in rows)
        assert cache.num_evictions * self.sizes.num_evicted == dropped
        assert cache.get_seq_length() == max(cache.positions()) <= MAX_POSITION
        for i, row in enumerate(rows):
            assert cache.index(i).tolist() == [entry.token for entry in row.entries]
        if self.is_even:
            check_held(cache, rows)


def check_held(cache, rows):
    """What the layers show is what the rows, all of one length, must hold."""
    for i, layer in enumerate(cache.layers):
        keys, values = batch(row.fake(i, row.found()) for row in rows)
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


def batch(pairs):
    keys, values = zip(*pairs, strict=True)
    return torch.stack(keys), torch.stack(values)


def assert_last(got, row, expected):
    """Of a row the last entries are these; what is before them is hidden."""
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x[row, :, x.shape[2] - y.shape[1] :], y)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=100,
    stateful_step_count=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_fakes_are_told_apart():
    """No sum of marks is another: the widest of each part is below the next part's unit."""
    assert (SPEC.context_len - 1, (NUM_HEADS - 1) * _HEAD) < (_HEAD, _LAYER)
    assert (NUM_LAYERS - 1) * _LAYER < _STREAM and (MAX_STREAMS - 1) * _STREAM < _TOKEN
    with pytest.raises(ValueError, match="cache_size must be at most 63 for fake"):
        StreamingCache(SPEC, CacheSizes(MAX_POSITION + 1))
