"""Lookup decoding: what is guessed changes no logits, no draw and no state, right or wrong."""

import itertools

import pytest
import torch
from helpers.methods import make, tables
from helpers.tiny_models import VOCAB

import kvalign
from kvalign.foundation.errors import UserError
from kvalign.streaming.lookup import LEAST_TRUST, Lookup

PROMPT = "The history of the island"
CASES = {
    "sinks": ("streaming-llm", "gpt2", {}),
    "rotary sinks": ("streaming-llm", "llama", {}),
    "grouped, half at once": ("streaming-llm", "qwen3", dict(num_evicted="half")),
    "all at once": ("streaming-llm", "gpt2", dict(num_evicted=16)),
    "many sinks": ("streaming-llm", "gpt_neox", dict(num_sinks=12)),
    "one entry": ("window", "mistral", dict(cache_size=1)),
    "turned at each step": ("streaming-llm", "llama", dict(cache_size=60)),
    "bloom": ("streaming-llm", "bloom", {}),
    "tables": ("kvalign", "gpt2", {}),
    "tables, rotary": ("kvalign", "llama", dict(num_sinks=4)),
    "tables, every 8": ("kvalign", "opt", dict(realign_every=8)),
}
REFUSED = {
    "another policy": ("streaming-llm", "llama", dict(policy="key-norm")),
    "kept positions": ("streaming-llm", "llama", dict(positions="keep")),
    "a memory": ("streaming-llm", "llama", dict(memory=100)),
    "re-encoding": ("recompute", "gpt2", {}),
    "networks": ("kvalign", "gpt2", {}),
    "no registry": ("window", "gpt_neo", {}),
}


def method_of(case, models):
    name, kind, changes = CASES[case]
    aligner = dict(aligner=tables(models[kind], 0.3)) if name == "kvalign" else {}
    return make(name, models[kind], **aligner, **changes)


def repeating(num_tokens, seed=0):
    """Ids [1, T] of 25 tokens that come again and again, now and then with another one."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (25,), generator=rng).repeat(num_tokens // 25 + 1)[:num_tokens]
    others = torch.randint(2, VOCAB, (num_tokens,), generator=rng)
    return torch.where(torch.rand(num_tokens, generator=rng) < 0.06, others, ids)[None]


def feed(lookup, method, ids):
    """Logits [T, V] after each of ids [T], and how many of them had been read ahead."""
    logits, num_ahead = [], 0
    for token in ids.tolist():
        lookup.append(token)
        ahead = method.cache.ahead
        num_ahead += ahead is not None and ahead.ids[:1] == [token]
        logits.append(lookup.feed(method)[0])
    return torch.stack(logits), num_ahead


QUICK = ("sinks", "rotary sinks", "tables")
MARKED = [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in CASES]


@pytest.mark.parametrize("case", MARKED)
def test_logits_and_state_are_those_of_stepping(case, models):
    """From a long prompt, over evictions, frames and their ends."""
    method, plain, first = method_of(case, models), method_of(case, models), 40
    ids = repeating(120)
    lookup = Lookup(6, ids[0, :first].tolist())
    for one in (method, plain):
        one.feed(ids[:, :first])
    logits, num_ahead = feed(lookup, method, ids[0, first:])
    expected = torch.cat([plain.feed(ids[:, i : i + 1]) for i in range(first, 120)])
    assert torch.allclose(logits, expected, atol=2e-3, rtol=1e-3)
    assert num_ahead > 30 or method.sizes.cache_size == 1
    assert method.cache.seen == plain.cache.seen and method.fill == plain.fill
    state, other = method.state(), plain.state()
    assert state.keys() == other.keys()
    for name, x in state.items():
        assert torch.allclose(x.float(), other[name].float(), atol=2e-3, rtol=1e-3), name


REPEATING = f"{PROMPT}. {PROMPT}. {PROMPT}"


def begin(loaded, **more):
    given = dict(cache_size=24, max_new_tokens=200, temperature=0) | more
    return kvalign.stream(loaded.model, loaded.tokenizer, REPEATING, **given)


def test_few_passes_write_a_text_that_repeats(minis, monkeypatch):
    model, passes = minis["llama-mini"].model, []
    stream = begin(minis["llama-mini"], lookup=16)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **x: passes.append(1) or forward(**x))
    "".join(stream)
    assert len(passes) < 0.5 * len(stream.token_ids)


@pytest.mark.slow
def test_a_stream_is_left_fed_and_saved_in_the_middle(minis, tmp_path):
    """Also where more has been read than was written."""
    gpt2, num_ahead = minis["gpt2-mini"], 0
    how = dict(seed=3, temperature=0.15, max_new_tokens=60)
    plain, looked_up = (begin(gpt2, lookup=lookup, **how) for lookup in (0, 8))
    for turn, num in enumerate((40, 3, 5, 1, 2, 4, 7, 30)):
        for one in (plain, looked_up):
            for _ in itertools.islice(one, num):
                pass
        num_ahead += bool(looked_up.method.cache.ahead and looked_up.method.cache.ahead.ids)
        looked_up.save(tmp_path / "talk")
        if turn % 2:
            looked_up = kvalign.load_stream(tmp_path / "talk", gpt2.model, gpt2.tokenizer)
            assert looked_up.sampling.lookup == 8
        if turn % 4 == 2:
            for one in (plain, looked_up):
                one.feed(f" {PROMPT}.")
        assert plain.ids == looked_up.ids and plain.num_fed == looked_up.num_fed
    assert num_ahead > 1
    assert "".join(plain) == "".join(looked_up) != ""


def test_guesses_follow_the_longest_place_and_stop_where_they_fail():
    lookup = Lookup(8, [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3])
    assert lookup.guess() == [4, 5, 6], "as many as were the same"
    for token in (4, 5):
        lookup.append(token)
    assert lookup.guess() == [6, 7, 9, 1, 2]
    lookup.append(0)
    assert lookup.guess() == []
    assert Lookup(5, [7, 8] * 4).guess() == [7, 8, 7, 8, 7], "what comes round goes on so"
    rng = torch.Generator().manual_seed(0)
    lookup = Lookup(8, torch.randint(0, 4, (2000,), generator=rng).tolist())
    assert lookup.trust < LEAST_TRUST and lookup.guess() == []
    for token in [1, 2, 3, 0, 0, 3, 2, 1, 1, 1] * 4:
        lookup.append(token)
    assert lookup.trust > LEAST_TRUST and len(lookup.guess()) == 8


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_taken_back_is_refused(case, models):
    name, kind, changes = REFUSED[case]
    method = make(name, models[kind], **changes)
    with pytest.raises(UserError, match="^lookup does not work with .*, which cannot undo a wrong"):
        next(kvalign.stream_tokens(method, torch.tensor([[5, 6]]), lookup=4))
