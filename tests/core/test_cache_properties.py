"""The cache's arithmetic against a list of births, for any sizes and any sequence of inputs.

No model: a fake key tells which token it is, in which row of the batch and layer, and at what
position it stands; a fake realigner rewrites the position alone. So what is stored must be the
tokens of the list, each at the position of its slot.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvalign.cache import StreamingCache
from kvalign.models import ModelSpec
from kvalign.realign import Realigner
from kvalign.sizes import CacheSizes

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 2, 3
# A key is token * _TOKEN + position + what marks row, layer, head and target: whole numbers that
# float32 holds exactly (below 2^24).
_TOKEN, _ROW, _LAYER, _HEAD, _TARGET = 2**10, 2**8, 2**7, 2**6, 2**22
MAX_POSITION = _HEAD - 1
SPEC = ModelSpec("fake", "fake", "learned", NUM_LAYERS, NUM_HEADS, HEAD_DIM, MAX_POSITION + 1)


class FromBirth(Realigner):
    recursive = False

    def anchor(self, layer, keys, values, born):
        back = torch.arange(born.start, born.stop)[:, None]
        return keys - back, values - back

    def place(self, layer, keys, values, move):
        return keys + move.now[:, None], values + move.now[:, None]


class Recursive(Realigner):
    recursive = True

    def place(self, layer, keys, values, move):
        return keys - move.shift, values - move.shift


@dataclass
class Born:
    """An entry of the list: a token of the stream and the position it was computed at."""

    token: int
    position: int


class CacheMachine(RuleBasedStateMachine):
    """Feeds, resets and selects rows in any order; the list is kept one token at a time."""

    @initialize(
        num_sinks=st.integers(0, 5),
        window=st.integers(1, 12),
        data=st.data(),
        num_rows=st.integers(1, 3),
        realigner=st.sampled_from([None, FromBirth(), Recursive()]),
    )
    def begin(self, num_sinks, window, data, num_rows, realigner):
        self.num_sinks, self.cache_size = num_sinks, num_sinks + window
        self.num_evicted = data.draw(st.integers(1, window), label="num_evicted")
        sizes = (self.cache_size, num_sinks, self.num_evicted)
        self.cache = StreamingCache(SPEC, CacheSizes(*sizes), realigner)
        self.realigns = realigner is not None
        self.rows = list(range(num_rows))
        self.entries: list[Born] = []
        self.num_tokens = 0

    @rule(data=st.data())
    def feed(self, data):
        stored = len(self.entries)
        room = min(MAX_POSITION + 1 - stored, 2 * self.cache_size + 3)
        length = data.draw(st.integers(1, room), label="tokens")
        before = self.expected_positions()
        for _ in range(length):
            self.entries.append(Born(self.num_tokens, len(self.entries)))
            self.num_tokens += 1
        seen, positions = self.entries[:], before + list(range(stored, stored + length))
        while len(self.entries) > self.cache_size:
            del self.entries[self.num_sinks : self.num_sinks + self.num_evicted]
        assert self.cache.get_mask_sizes(length, 0) == (stored + length, 0)
        for layer in range(NUM_LAYERS):
            assert self.cache.get_seq_length(layer) == stored
            new = self.fake(layer, seen, positions)[..., stored:, :]
            given = self.cache.update(new, new + _TARGET, layer)
            assert torch.equal(given[0], self.fake(layer, seen, positions))
            assert torch.equal(given[1], self.fake(layer, seen, positions) + _TARGET)

    @rule()
    def reset(self):
        self.cache.reset()
        self.entries, self.num_tokens = [], 0
        assert self.cache.slots.num_evictions == self.cache.slots.num_seen == 0

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def select_rows(self, data):
        rows = st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=3)
        chosen = data.draw(rows, label="rows")
        self.cache.batch_select_indices(torch.tensor(chosen))
        self.rows = [self.rows[i] for i in chosen]

    @precondition(lambda self: self.entries and len(self.rows) == 1)
    @rule(repeats=st.integers(1, 3))
    def repeat_rows(self, repeats):
        self.cache.batch_repeat_interleave(repeats)
        self.rows = self.rows * repeats

    @invariant()
    def cache_is_the_list(self):
        slots, stored = self.cache.slots, len(self.entries)
        assert slots.index.tolist() == [entry.token for entry in self.entries]
        assert slots.birth.tolist() == [entry.position for entry in self.entries]
        assert stored == len(slots) == min(stored, self.cache_size)
        first = min(self.num_tokens, self.num_sinks)
        assert slots.index[:first].tolist() == slots.birth[:first].tolist() == list(range(first))
        assert (slots.index.diff() > 0).all()
        if stored:
            assert slots.index[-1] == self.num_tokens - 1
        if self.num_tokens >= self.cache_size:
            assert stored > self.cache_size - self.num_evicted
        for i, layer in enumerate(self.cache.layers):
            assert self.cache.get_seq_length(i) == layer.get_seq_length() == stored
            if stored:
                expected = self.fake(i, self.entries, self.expected_positions())
                assert torch.equal(layer.keys, expected)
                assert torch.equal(layer.values, expected + _TARGET)

    def expected_positions(self) -> list[int]:
        """Where the entries are now, or were born if nothing moves them."""
        if self.realigns:
            return list(range(len(self.entries)))
        return [entry.position for entry in self.entries]

    def fake(self, layer: int, entries: list[Born], positions: list[int]) -> torch.Tensor:
        """Keys [B, H, S, D] of these tokens at these positions."""
        tokens = torch.tensor([entry.token for entry in entries]) * _TOKEN + torch.tensor(positions)
        marks = torch.tensor(self.rows)[:, None] * _ROW + torch.arange(NUM_HEADS) * _HEAD
        keys = marks[..., None] + tokens + layer * _LAYER  # [B, H, S]
        return keys[..., None].expand(*keys.shape, HEAD_DIM).float()


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
    assert (NUM_LAYERS - 1) * _LAYER < _ROW and 2 * _ROW + _ROW <= _TOKEN
    with pytest.raises(ValueError, match="cache_size must be at most 63 for fake"):
        StreamingCache(SPEC, CacheSizes(MAX_POSITION + 1))
