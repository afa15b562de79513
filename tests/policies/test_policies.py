"""Each policy against a loop over a plain model that keeps lists of entries and places them from
their birth; what it keeps, and what it does where nothing is special about it.
"""

from pathlib import Path

import pytest
import torch
from helpers.methods import tables
from helpers.pairwise import one_of_each, pairwise
from helpers.plain_policies import PlainLoop, plain_copy
from helpers.tiny_models import VOCAB, tiny_model

from kvalign import StreamingCache, load_model, make_method
from kvalign.cache.any_slot_cache import AnySlotCache
from kvalign.policies import OLDEST, POLICIES

CACHE_SIZE, NUM_STEPS = 16, 120
SIZES = (  # num_sinks, num_evicted, num_recent
    (0, 1, None),
    (4, 1, 0),
    (4, 3, 1),
    (0, 3, 8),
)
PLACES = ("gpt2", "gpt2 table", "gpt2 keep", "llama", "llama table", "llama keep")


def cases():
    """Each policy in each place, and both with each of the sizes; quick where entries move."""
    for policy, place, sizes in pairwise(POLICIES, PLACES, SIZES):
        marks = () if place in ("gpt2 table", "llama") else pytest.mark.slow
        yield pytest.param(policy, place, *sizes, marks=marks)


@pytest.fixture(scope="module")
def pairs():
    """Models of two layers and two heads of keys, and their plain copies. Where positions are kept
    the learned one has enough of them.
    """
    few = dict(gpt2=dict(n_layer=2), llama=dict(num_hidden_layers=2))
    made = {kind: tiny_model(kind, **changes) for kind, changes in few.items()}
    made["gpt2 keep"] = tiny_model("gpt2", n_layer=2, n_positions=NUM_STEPS)
    return {name: (model, plain_copy(model)) for name, model in made.items()}


def with_policy_cache(method):
    """A method that would take a slice of its stream, with the cache that gathers."""
    method.cache = AnySlotCache(method.spec, method.sizes, method.realigner(), method.model.config)
    method.is_exact = False
    return method


def compare(method, plain, ids):
    """Step both through ids [N]; the largest difference of logits."""
    worst = 0.0
    for i, token in enumerate(ids):
        expected = plain.step(token)
        logits = method.feed(token.view(1, 1))[0]
        worst = max(worst, (logits - expected).abs().max().item())
        assert worst < 1e-4, f"step {i}"
        index = method.cache.index()
        plain.evict(index)
        assert index.tolist() == plain.index()
    return worst


@pytest.mark.parametrize(("policy", "place", "num_sinks", "num_evicted", "num_recent"), cases())
def test_it_is_the_plain_loop(policy, place, num_sinks, num_evicted, num_recent, pairs):
    kind, _, way = place.partition(" ")
    model, copy = pairs[place if place in pairs else kind]
    extra, table = {}, None
    if way == "table":
        extra = {"aligner": tables(model, scale=0.5)}
        table = dict(extra["aligner"].named_parameters())
    method = make_method(
        "kvalign" if way == "table" else "streaming-llm",
        model,
        cache_size=CACHE_SIZE,
        num_sinks=num_sinks,
        num_evicted=num_evicted,
        policy=policy,
        num_recent=None if policy == OLDEST else num_recent,
        positions="keep" if way == "keep" else None,
        warn=False,
        **extra,
    )
    if method.sizes.is_oldest:  # which would take a slice
        method = with_policy_cache(method)
    ids = torch.randint(2, VOCAB, (NUM_STEPS,), generator=torch.Generator().manual_seed(5))
    plain = PlainLoop(copy, method.sizes, table)
    compare(method, plain, ids)
    assert plain.num_swapped <= 0.01 * plain.num_dropped


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "name"), one_of_each(POLICIES, ["gpt2-mini", "llama-mini"]))
def test_it_is_the_plain_loop_on_a_shipped_model(policy, name):
    loaded = load_model(name)
    method = make_method("kvalign", loaded.model, cache_size=16, num_sinks=4, policy=policy)
    if policy == OLDEST:
        method = with_policy_cache(method)
    table = dict(method.aligner.named_parameters())
    plain = PlainLoop(plain_copy(loaded.model), method.sizes, table)
    text = Path(__file__).read_text()
    compare(method, plain, torch.tensor(loaded.tokenizer(text)["input_ids"][:48]))
    assert plain.num_swapped <= 0.05 * plain.num_dropped


@pytest.mark.parametrize("place", ["gpt2", "gpt2 table", "llama", "llama table"])
@pytest.mark.parametrize("num_evicted", [1, 3])
def test_oldest_is_the_streaming_cache(place, num_evicted, pairs, ids):
    kind, _, way = place.partition(" ")
    model = pairs[kind][0]
    extra = {"aligner": tables(model, scale=0.5)} if way else {}
    name, sizes = "kvalign" if way else "streaming-llm", dict(cache_size=16, num_sinks=3)
    made = [
        make_method(name, model, num_evicted=num_evicted, warn=False, **sizes, **extra)
        for _ in range(2)
    ]
    slices, gathers = made[0], with_policy_cache(made[1])
    assert type(slices.cache) is StreamingCache
    for i in range(100):
        expected, logits = (method.feed(ids[:, i : i + 1]) for method in (slices, gathers))
        assert torch.allclose(logits, expected, atol=1e-4), i
        kept = gathers.cache.index(1)
        assert (kept == slices.cache.index(1)).all() and kept.shape[:2] == (2, 2)


@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in (OLDEST, "second-chance")])
def test_heads_and_layers_differ(policy, pairs, ids):
    """Of `tova` the layers alone: a layer's heads keep the same. Attention of random weights is so
    even that `second-chance` finds no light entry.
    """
    method = make_method("streaming-llm", pairs["llama"][0], cache_size=16, policy=policy)
    method.feed(ids[:, :100])
    (a, b), (c, d) = method.cache.index()
    assert a.tolist() != c.tolist()
    assert (a.tolist() == b.tolist()) == (c.tolist() == d.tolist()) == (policy == "tova")
