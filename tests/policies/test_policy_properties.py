"""A cache from which any entry may go, against a list of entries for each row, layer and head: any
order of evictions, sizes, rows and inputs.

No model: a fake key says in its numbers which token it is of, at what position it stands and whose
it is; a fake realigner rewrites the position alone. Scores are drawn, small whole numbers with many
ties, and the lists are told of them.
"""

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.nn.functional import pad
from transformers import GPT2Config

from kvalign.cache.any_slot_cache import AnySlotCache
from kvalign.cache.realign import FromBirth
from kvalign.cache.realigner import Realigner
from kvalign.cache.sizes import CacheSizes
from kvalign.models.architectures import spec_of
from kvalign.policies.base import Policy

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 2, 3
CONFIG = GPT2Config(n_layer=NUM_LAYERS, n_head=NUM_HEADS, n_embd=NUM_HEADS * HEAD_DIM)
MODEL = SimpleNamespace(config=CONFIG, device=torch.device("cpu"), dtype=torch.float32)
SPEC = replace(spec_of(CONFIG), context_len=None)
POSITION = torch.tensor([0.0, 1.0, 0.0])  # token, position, whose


class FakeFromBirth(FromBirth):
    def __init__(self):
        Realigner.__init__(self)

    def anchor(self, layer, keys, values, birth, at):
        at = torch.arange(at.start, at.stop) if isinstance(at, slice) else at
        return keys - at[:, None] * POSITION, values - at[:, None] * POSITION

    def place(self, layer, keys, values, move):
        return keys + move.now[:, None] * POSITION, values + move.now[:, None] * POSITION


class Drawn(Policy):
    """Scores at random; `accumulates`: on top of those of before."""

    def __init__(self, accumulates, seed):
        self.accumulates = accumulates
        self.generator = torch.Generator().manual_seed(seed)
        self.last = {}

    def score(self, seen):
        shape = seen.keys.shape[:3]
        drawn = torch.randint(0, 4, shape, generator=self.generator).float()
        self.last[seen.layer] = drawn
        missing = drawn.shape[2] - seen.before.shape[2]
        return pad(seen.before, (0, missing)) + drawn if self.accumulates else drawn


@dataclass
class Entry:
    token: int
    birth: int
    score: float = 0.0


class Stream:
    """What a row must hold: by layer and head a list, in the order of time."""

    def __init__(self, sizes, mark):
        self.sizes, self.mark, self.seen = sizes, mark, 0
        self.lists = [[[] for _ in range(NUM_HEADS)] for _ in range(NUM_LAYERS)]

    @property
    def position(self):
        return self.seen if self.sizes.positions == "keep" else len(self.lists[0][0])

    def take(self, num):
        position = self.position
        for entries in (entries for heads in self.lists for entries in heads):
            entries += [Entry(self.seen + i, position + i) for i in range(num)]
        self.seen += num

    def fake(self, layer, is_placed, skip=0):
        """Keys and values [H, S, D] of a layer's entries after the first `skip`."""
        rows = []
        for head, entries in enumerate(self.lists[layer]):
            whose = self.mark * 100 + layer * 10 + head
            rows.append(
                [
                    (
                        e.token,
                        rank if is_placed and e.token >= self.sizes.num_sinks else e.birth,
                        whose,
                    )
                    for rank, e in enumerate(entries)
                ][skip:]
            )
        keys = torch.tensor(rows).float()
        return keys, keys + torch.tensor([0.0, 0.0, 0.5])

    def evict(self, drawn, accumulates):
        """What was drawn [H, S] by layer, for this row's entries."""
        num_gone = len(self.lists[0][0]) - self.sizes.num_stored(self.seen)
        may = range(self.sizes.num_sinks, self.seen - self.sizes.num_recent)
        for heads, of_layer in zip(self.lists, drawn, strict=True):
            for head, (entries, worth) in enumerate(zip(heads, of_layer, strict=True)):
                for entry, score in zip(entries, worth.tolist(), strict=True):
                    entry.score = accumulates * entry.score + score
                order = sorted(entries, key=lambda e: (e.score, e.token))
                gone = [e.token for e in order if e.token in may][:num_gone]
                assert len(gone) == num_gone
                heads[head] = [e for e in entries if e.token not in gone]


class PolicyMachine(RuleBasedStateMachine):
    """Feeds, resets, selects, joins and restores rows in any order."""

    @initialize(
        num_sinks=st.integers(0, 4),
        window=st.integers(1, 9),
        data=st.data(),
        num_rows=st.integers(1, 3),
        kind=st.sampled_from(["stale", "placed", "keep"]),
        accumulates=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def begin(self, num_sinks, window, data, num_rows, kind, accumulates, seed):
        num_evicted = data.draw(st.integers(1, window), label="num_evicted")
        num_recent = data.draw(st.integers(0, window + 1 - num_evicted), label="num_recent")
        positions = "keep" if kind == "keep" else "compact"
        sizes = dict(num_evicted=num_evicted, num_recent=num_recent, positions=positions)
        self.sizes = CacheSizes(num_sinks + window, num_sinks, policy="random", **sizes)
        self.is_placed, self.policy = kind == "placed", Drawn(accumulates, seed)
        self.num_streams = 0
        self.cache, self.rows = self.new_cache(), self.new_rows(num_rows)

    def new_cache(self):
        realigner = FakeFromBirth() if self.is_placed else None
        cache = AnySlotCache(SPEC, self.sizes, realigner, CONFIG)
        for part in (cache, *cache.layers):
            part.policy = self.policy
        return cache

    def new_rows(self, num_rows):
        self.num_streams += num_rows
        first = self.num_streams - num_rows
        return [Stream(self.sizes, mark) for mark in range(first, self.num_streams)]

    @property
    def is_even(self):
        return len({row.seen for row in self.rows}) == 1

    @rule(times=st.integers(1, 9))
    def feed_one_by_one(self, times):
        for _ in range(times):
            self.feed(self.cache, self.rows, 1)

    @precondition(lambda self: self.is_even)
    @rule(data=st.data())
    def feed_several(self, data):
        num = data.draw(st.integers(1, self.sizes.first_input_len), label="tokens")
        self.feed(self.cache, self.rows, num)

    def feed(self, cache, rows, num):
        stored = [len(row.lists[0][0]) for row in rows]
        assert cache.get_mask_sizes(num, 0)[0] == max(stored) + num
        self.policy.last = {}
        for row in rows:
            row.take(num)
        # Several tokens at once are for a method, which begins the pass.
        with cache.forward_pass(len(rows), num) if num > 1 else nullcontext():
            for layer in range(NUM_LAYERS):
                new = [row.fake(layer, False, skip) for row, skip in zip(rows, stored, strict=True)]
                got = cache.update(*(torch.stack(x) for x in zip(*new, strict=True)), layer)
                for i, row in enumerate(rows):
                    for x, expected in zip(got, row.fake(layer, self.is_placed), strict=True):
                        assert x.shape[2] == max(stored) + num
                        assert torch.equal(x[i, :, x.shape[2] - expected.shape[1] :], expected)
        for i, (row, skip) in enumerate(zip(rows, stored, strict=True)):
            if self.policy.last:
                last = self.policy.last.items()
                parts = [x[i, :, x.shape[2] - skip - num :] for _, x in sorted(last)]
                row.evict(parts, self.policy.accumulates)
            assert len(row.lists[0][0]) == self.sizes.num_stored(row.seen)

    @rule()
    def reset(self):
        self.cache.reset()
        self.rows = self.new_rows(len(self.rows))

    @precondition(lambda self: self.rows[0].seen)
    @rule(data=st.data())
    def select_rows(self, data):
        choice = st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=4)
        chosen = data.draw(choice, label="rows")
        self.cache.reorder_cache(torch.tensor(chosen))
        self.rows = [copy.deepcopy(self.rows[i]) for i in chosen]

    @precondition(lambda self: len(self.rows) <= 3)
    @rule(parts=st.lists(st.integers(1, 12), min_size=1, max_size=3), num_rows=st.integers(1, 2))
    def join_rows(self, parts, num_rows):
        other, rows = self.new_cache(), self.new_rows(num_rows)
        for num in parts:
            self.feed(other, rows, min(num, self.sizes.first_input_len))
        self.rows = [*(self.rows if self.rows[0].seen else []), *rows]
        self.cache.join([other])

    @rule()
    def save_and_restore(self):
        state = {name: x.clone() for name, x in self.cache.state().items()}
        self.cache = self.new_cache()
        self.cache.restore(state, MODEL)

    @invariant()
    def cache_is_the_lists(self):
        if not self.rows[0].seen:
            return
        assert self.cache.seen == [row.seen for row in self.rows]
        assert self.cache.positions() == [row.position for row in self.rows]
        for i, row in enumerate(self.rows):
            index = self.cache.index(i)
            assert index.tolist() == [[[e.token for e in x] for x in y] for y in row.lists]
            assert (index.diff() > 0).all()  # in the order of time, none twice
            first, newest = min(self.sizes.num_sinks, row.seen), row.seen - self.sizes.num_recent
            assert (index[:, :, :first] == torch.arange(first)).all()
            recent = torch.arange(max(newest, 0), row.seen)
            assert (index[:, :, index.shape[2] - len(recent) :] == recent).all()


TestPolicyCache = PolicyMachine.TestCase
TestPolicyCache.settings = settings(
    max_examples=80,
    stateful_step_count=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
