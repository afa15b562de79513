"""A stream with a memory against a loop over a plain model that keeps every entry and scores them
all: token by token and by segments, rows that join and change places, and after a file.
"""

from itertools import pairwise

import pytest
import torch
from helpers.methods import anchored, tables
from helpers.pairwise import covering
from helpers.plain_memory import TOLERANCE, PlainMemory
from helpers.tiny_models import REGISTERED_KINDS, VOCAB, tiny_model
from safetensors.torch import load, save

from kvalign.methods import make_method
from kvalign.models.architectures import FAMILIES

SIZES = dict(cache_size=16, num_sinks=2, memory=90, num_recalled=6)
WAYS = {
    "rotary": ["rotation", "rotation rank", "table", "table rank"],
    "learned": ["table", "table age", "anchored"],
}
FAST = [("llama", "rotation"), ("gpt2", "table age")]
SLOW = covering(
    [(kind, way) for kind in REGISTERED_KINDS for way in WAYS[FAMILIES[kind]]],
    lambda kind, way: (FAMILIES[kind], way),
    lambda kind, _: kind,
)
NUM_STEPS = 150


@pytest.fixture(scope="module")
def pairs():
    """Models, and their plain copies."""
    models = {kind: tiny_model(kind) for kind in REGISTERED_KINDS}
    return {kind: (model, PlainMemory.copy(model)) for kind, model in models.items()}


def made(model, copy, way="rotation", **changes):
    """A method, and what makes plain loops that do the same."""
    kind, _, places = way.partition(" ")
    sizes = SIZES | dict(recall_places=places or None) | changes
    if kind == "rotation":
        method, table = make_method("streaming-llm", model, **sizes), None
    else:
        aligner = (anchored if kind == "anchored" else tables)(model, scale=0.3)
        method = make_method("kvalign", model, aligner=aligner, **sizes)
        table = dict(getattr(aligner, "table", aligner).named_parameters())
    return method, lambda num=NUM_STEPS: PlainMemory(copy, method.sizes, table, num)


def follow(plain, ids, logits):
    """Step a plain loop through ids [N], and compare with logits [N, V]."""
    for i, (token, found) in enumerate(zip(ids, logits, strict=True)):
        apart = (plain.step(token, found) - found).abs().max().item()
        assert apart < TOLERANCE, f"step {i}: {apart}"
    assert plain.num_swapped <= 0.05 * plain.seen


def text(num, rows=1, seed=5):
    return torch.randint(2, VOCAB, (rows, num), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("kind", "way", "num"),
    [
        *((*case, 70) for case in FAST),
        *(pytest.param(*case, NUM_STEPS, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_it_is_the_plain_loop(kind, way, num, pairs):
    """Token by token, and by segments."""
    method, plain = made(*pairs[kind], way)
    ids = text(num)
    steps = [method.feed(ids[:, i : i + 1])[0] for i in range(num)]
    follow(plain(), ids[0], torch.stack(steps))
    if not method.is_exact:
        return
    method.reset()
    cuts = [0, 1, 8, num // 3, num // 3 + 1, num]
    parts = [method.feed_segment(ids[:, a:b])[0] for a, b in pairwise(cuts)]
    follow(plain(), ids[0], torch.cat(parts).float())


@pytest.mark.parametrize(
    ("kind", "way"), [("llama", "rotation"), ("gpt2", "table rank"), ("gpt2", "table age")]
)
def test_some_layers_take_back(kind, way, pairs):
    """The others keep their whole window, and no memory."""
    method, plain = made(*pairs[kind], way, recall_layers="0,2")
    ids = text(70)
    steps = [method.feed(ids[:, i : i + 1])[0] for i in range(70)]
    follow(plain(), ids[0], torch.stack(steps))
    assert [*method.cache.memory.of] == [0, 2]
    method.reset()
    parts = [method.feed_segment(ids[:, a:b])[0] for a, b in pairwise([0, 5, 40, 70])]
    follow(plain(), ids[0], torch.cat(parts).float())


@pytest.mark.slow
def test_once_the_oldest_are_written_over(pairs):
    """A memory has room for a segment more than it gives back, then its slots come round."""
    method, plain = made(*pairs["llama"])
    ids = text(900)
    cuts = [0, 1, 400, 800, *range(801, 901)]
    parts = [method.feed_segment(ids[:, a:b])[0] for a, b in pairwise(cuts)]
    assert all(memory.num_slots < 800 for memory in method.cache.memory.of.values())
    follow(plain(900), ids[0], torch.cat(parts).float())


@pytest.mark.parametrize(
    ("kind", "way", "changes"),
    [
        ("qwen2", "rotation", {}),
        ("qwen2", "rotation", dict(recall_layers="1")),
        ("llama", "table", {}),
        pytest.param("llama", "table rank", {}, marks=pytest.mark.slow),
        pytest.param("opt", "table", {}, marks=pytest.mark.slow),
        pytest.param("gpt2", "table age", {}, marks=pytest.mark.slow),
    ],
)
def test_rows_are_plain_loops(kind, way, changes, pairs):
    """Of unequal lengths: they join, change places, are saved, and go on."""
    method, plain = made(*pairs[kind], way, **changes)
    lens, num = (3, 21, 60), 12
    rows = [text(n + 3 * num, seed=n)[0] for n in lens]
    loops, fed = [plain() for _ in lens], list(lens)
    for loop, row, n in zip(loops, rows, lens, strict=True):
        alone = method.new()
        logits = [alone.feed(row[None, i : i + 1])[0] for i in range(n)]
        follow(loop, row[:n], torch.stack(logits))
    method, *others = (method.new() for _ in lens)
    for one, row, n in zip((method, *others), rows, lens, strict=True):
        one.feed(row[None, :n])
    method.join(others)
    for stage in range(3):
        if stage == 1:
            order = [2, 0, 1]
            method.select(order)
            loops, rows, fed = ([x[i] for i in order] for x in (loops, rows, fed))
        if stage == 2:
            state = load(save({name: x.contiguous() for name, x in method.state().items()}))
            method = method.new()
            method.restore(state)
        tokens = torch.stack([row[n : n + num] for row, n in zip(rows, fed, strict=True)])
        logits = torch.stack([method.feed(tokens[:, i : i + 1]) for i in range(num)], 1)
        for loop, ids, found in zip(loops, tokens, logits, strict=True):
            follow(loop, ids, found)
        fed = [n + num for n in fed]


@pytest.mark.parametrize("places", ["age", "rank"])
def test_recalling_all_is_dense_attention(places):
    """All that a memory of so few tokens holds: what attends to the C + 1 newest entries is
    transformers' own sliding window. Places by age are true distances there.
    """
    model = tiny_model("mistral", sliding_window=None)
    banded = tiny_model("mistral", sliding_window=17)
    sizes = dict(cache_size=16, num_sinks=0, memory=8, num_recalled=8, recall_places=places)
    # No token comes twice while it is remembered: none says again what another does.
    ids = torch.randperm(VOCAB - 2, generator=torch.Generator().manual_seed(5))[None, :64] + 2
    expected = banded(input_ids=ids, use_cache=False).logits[0]
    method = make_method("streaming-llm", model, warn=False, **sizes)
    steps = torch.stack([method.feed(ids[:, i : i + 1])[0] for i in range(64)])
    assert torch.allclose(steps, expected, atol=TOLERANCE)
