"""A memory that is full, and turns many times. What is taken back is old and new, never older than
the memory is long, and is what its own token says: in the first layer an entry without its position
depends on the token alone, so it can be computed again.
"""

import pytest
import torch
from helpers.methods import tables
from helpers.tiny_models import tiny_model
from torch import Tensor
from torch.testing import assert_close

from kvalign.cache.segments import SEGMENT_LEN
from kvalign.methods import make_method

VOCAB_SIZE = 50_000  # few tokens come twice while they are remembered
SHAPE = dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
MEMORY = 2000


class Gone:
    """Looks at what a method takes back of its first layer.

    Attributes:
        ids: [1, N], the newest tokens.
        oldest: age of the oldest that was taken back.
        num_taken: entries that were.
        num_other: those that were not their token's own.
    """

    def __init__(self, model, method):
        self.model, self.method = model, method
        self.ids = torch.zeros(1, 1, dtype=torch.int64)
        self.oldest = self.num_taken = self.num_other = 0
        method.feed_segment(self.ids)  # and there is a memory
        self.memory = method.cache.memory.of[0]
        method.cache.memory.watched = self.watched = []  # so that entries are given
        self.find, self.memory.find = self.memory.find, self.look

    def feed(self, ids: Tensor) -> Tensor:
        """Logits after a segment of ids [1, T]."""
        self.ids = torch.cat([self.ids, ids], 1)[:, -MEMORY - 4 * SEGMENT_LEN :]
        return self.method.feed_segment(ids, logits_to_keep=1)

    def look(self, queries: Tensor, asking):
        self.watched.clear()
        found = self.find(queries, asking)
        ages, is_seen = found.ages[0, 0], found.visible[0, 0]  # [T, R]
        # The segment is among the ids.
        num_after = self.method.cache.seen[0] + SEGMENT_LEN - asking.seen[0]
        places = self.ids.shape[1] - num_after[:, None] - ages
        values = self._values(self.ids[0, places[is_seen]])
        apart = (values - found.entries.values[0, 0][is_seen]).abs().amax(-1)
        self.oldest = max(self.oldest, int(ages[is_seen].max()) if is_seen.any() else 0)
        self.num_taken += len(apart)
        self.num_other += int((apart > 1e-4).sum())
        return found

    def _values(self, ids: Tensor) -> Tensor:
        layer = self.model.model.layers[0]
        hidden = layer.input_layernorm(self.model.model.embed_tokens(ids))
        return layer.self_attn.v_proj(hidden)


@pytest.mark.slow
@torch.no_grad()
def test_what_is_taken_back_is_of_its_token_and_of_the_memory():
    model = tiny_model("llama", vocab_size=VOCAB_SIZE, intermediate_size=32, **SHAPE)
    model.model.layers[0].self_attn.q_proj.weight.mul_(100)  # scores that outweigh their ages
    method = make_method("streaming-llm", model, cache_size=63, num_sinks=4, memory=MEMORY)
    rng, gone = torch.Generator().manual_seed(4), Gone(model, method)
    for _ in range(12_000 // SEGMENT_LEN):
        ids = torch.randint(2, VOCAB_SIZE, (1, SEGMENT_LEN), generator=rng)
        assert gone.feed(ids).isfinite().all()
    assert gone.oldest == MEMORY + method.sizes.num_in_sight == 2044
    assert gone.num_taken > 90_000 and gone.num_other == 0
    held = gone.memory.entries
    assert held.keys.shape[2] <= MEMORY + 2 * SEGMENT_LEN, "it does not grow"
    assert all(x.isfinite().all() for x in held)


READ = {
    "steps": lambda method, ids: [method.feed(token) for token in ids.split(1, 1)],
    "segments": lambda method, ids: [method.feed_segment(part) for part in ids.split(8, 1)],
    "one": lambda method, ids: [method.feed_segment(ids)],
}


CHANGED = ("restored", "joined", "edited")


def changed(method, way: str):
    """The method as it is, restored from its state, beside a shorter stream, or edited."""
    other = method.new()
    if way == "restored":
        other.restore({name: x.clone() for name, x in method.state().items()})
        return other
    if way == "joined":
        other.feed(torch.tensor([[5, 6, 7]]))
        method.join([other])
        method.select([0])
    if way == "edited":
        method.edit(method.num_tokens - 6, method.num_tokens - 3)
    return method


@pytest.mark.parametrize(
    ("read", "way"),
    [*((read, "as it is") for read in READ), *(("segments", way) for way in CHANGED)],
)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@torch.no_grad()
def test_a_ring_that_turns_gives_what_a_longer_one_gives(kind, read, way, monkeypatch):
    """Of 32 slots each is written some times; the longer ring has one for each token."""
    model, logits = tiny_model(kind, vocab_size=400), []
    ids = torch.randperm(398, generator=torch.Generator().manual_seed(3))[None, :120] + 2
    sizes = dict(cache_size=10, num_sinks=2, memory=13, num_recalled=3, warn=False)
    aligner = {"aligner": tables(model, 0.3)} if kind == "gpt2" else {}
    for spare in (512, 8):
        for module in ("cache.segments", "memory.memory"):
            monkeypatch.setattr(f"kvalign.{module}.PART_LEN", spare)
        method = make_method("kvalign" if aligner else "streaming-llm", model, **sizes, **aligner)
        logits.append([])
        for part in ids.split(60, 1):
            logits[-1] += READ[read](method, part)
            method = changed(method, way)
        assert {one.most == 32 for one in method.cache.memory.of.values()} == {spare == 8}
    for one, other in zip(*logits, strict=True):
        assert_close(one, other, rtol=0, atol=1e-5)
