"""Lookup decoding: what is guessed changes no logits, no draw and no state, right or wrong."""

import itertools

import pytest
import torch
from helpers.methods import make, tables
from helpers.tiny_models import VOCAB
from transformers import LogitsProcessorList, TemperatureLogitsWarper

import kvalign
from kvalign.foundation.errors import UserError
from kvalign.models.loading import load_model
from kvalign.streaming.lookup import LEAST_TRUST, Lookup, most_at_once, read_ahead, take_ahead
from kvalign.streaming.loop import Row
from kvalign.streaming.sampling import MOST_GUESSED, Sampling

PROMPT = "The history of the island"
CASES = {
    "window": ("window", "gpt2", {}),
    "sinks": ("streaming-llm", "gpt2", {}),
    "rotary": ("window", "llama", {}),
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
    "half re-encoded": ("discard-half", "gpt2", {}),
    "dense": ("dense", "gpt2", {}),
    "networks": ("kvalign", "gpt2", {}),
    "no registry": ("window", "gpt_neo", {}),
}


@pytest.fixture(scope="module")
def loaded():
    return {name: load_model(name) for name in ("gpt2-mini", "llama-mini")}


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
    ids = repeating(150)
    lookup = Lookup(6, ids[0, :first].tolist())
    for one in (method, plain):
        one.feed(ids[:, :first])
    logits, num_ahead = feed(lookup, method, ids[0, first:])
    expected = torch.cat([plain.feed(ids[:, i : i + 1]) for i in range(first, 150)])
    assert torch.allclose(logits, expected, atol=2e-3, rtol=1e-3)
    assert num_ahead > 40 or method.sizes.cache_size == 1
    assert method.cache.seen == plain.cache.seen and method.fill == plain.fill
    state, other = method.state(), plain.state()
    assert state.keys() == other.keys()
    for name, x in state.items():
        assert torch.allclose(x.float(), other[name].float(), atol=2e-3, rtol=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_was_not_meant_is_taken_back(case, models):
    """Entries of before are the same to the bit, whatever was read ahead, and nothing of that is
    ever seen; from an empty window to past the ends of frames.
    """
    method, plain = method_of(case, models), method_of(case, models)
    ids = repeating(110, seed=3)
    for one in (method, plain):
        one.feed(ids[:, :14])
    for i in range(14, 110):
        token = ids[:, i : i + 1]
        most = most_at_once(method.cache)
        guessed = torch.randint(2, VOCAB, (1, min(1 + i % 7, most) - 1))
        plain.feed_segment(token)
        read_ahead(method, torch.cat([token, guessed], 1))
        assert method.cache.ahead.ids == guessed[0].tolist()
        assert take_ahead(method.cache, VOCAB) is None
        if i % 10 == 9:
            mine, other = method.state(), plain.state()
            assert method.cache.ahead is None, "it has been settled"
            assert torch.equal(mine["seen"], other["seen"])
            for name, x in mine.items():
                assert torch.allclose(x.float(), other[name].float(), atol=1e-3), name
    assert torch.allclose(method.feed(ids[:, :1]), plain.feed(ids[:, :1]), atol=2e-3, rtol=1e-3)


def test_entries_of_before_stay_to_the_bit(models):
    method = method_of("rotary sinks", models)
    method.feed(repeating(70))
    before = method.state()
    read_ahead(method, torch.randint(2, VOCAB, (1, 7)))
    after = method.state()
    for name in ("entries.0", "entries.1"):
        old, new = before[f"0.{name}"], after[f"0.{name}"]
        assert torch.equal(old[:, :, 5:], new[:, :, 4:-1]), "one came, one went"
        assert torch.equal(
            before[f"0.{name.replace('entries', 'sinks')}"], after[f"0.sinks.{name[-1]}"]
        )


REPEATING = f"{PROMPT}. {PROMPT}. {PROMPT}"
HOW = [
    dict(temperature=0),
    dict(seed=3, temperature=0.4),
    dict(seed=5, top_k=0, temperature=0.5, repetition_penalty=1.1),
    dict(temperature=0, no_repeat_ngram_size=7),
]


def begin(loaded, **more):
    given = dict(cache_size=24, max_new_tokens=200, temperature=0) | more
    return kvalign.stream(loaded.model, loaded.tokenizer, REPEATING, **given)


METHODS = [
    ("gpt2-mini", "kvalign", 24),
    ("gpt2-mini", "window", 64),
    ("llama-mini", "streaming-llm", 24),
    ("llama-mini", "kvalign", 100),
]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "how"), zip(METHODS, HOW, strict=True), ids=str)
def test_the_text_is_the_same(what, how, loaded):
    name, method, cache_size = what
    more = dict(method=method, cache_size=cache_size, max_new_tokens=150, **how)
    plain, looked_up = (begin(loaded[name], lookup=lookup, **more) for lookup in (0, 8))
    assert "".join(plain) == "".join(looked_up)
    assert plain.ids == looked_up.ids and len(plain.ids) > 150


def test_few_passes_write_a_text_that_repeats(loaded, monkeypatch):
    model, passes = loaded["llama-mini"].model, []
    stream = begin(loaded["llama-mini"], lookup=16)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **x: passes.append(1) or forward(**x))
    "".join(stream)
    assert len(passes) < 0.5 * len(stream.token_ids)


@pytest.mark.slow
def test_a_stream_is_left_fed_and_saved_in_the_middle(loaded, tmp_path):
    """Also where more has been read than was written."""
    gpt2, num_ahead = loaded["gpt2-mini"], 0
    how = dict(seed=3, temperature=0.15)
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


@pytest.mark.slow
def test_a_stop_string_ends_where_it_ends_without(loaded):
    gpt2 = loaded["gpt2-mini"]
    whole = "".join(begin(gpt2))
    for stop in (whole[100:104], whole[200:205]):
        plain, looked_up = (begin(gpt2, lookup=lookup, stop_strings=stop) for lookup in (0, 8))
        assert "".join(plain) == "".join(looked_up) and plain.has_ended
        for one in (plain, looked_up):
            one.feed(" Then")
        assert "".join(plain) == "".join(looked_up) and plain.ids == looked_up.ids


@pytest.mark.slow
def test_an_end_token_ends_where_it_ends_without(loaded, monkeypatch):
    gpt2 = loaded["gpt2-mini"]
    free = begin(gpt2)
    "".join(free)
    monkeypatch.setattr(gpt2.model.generation_config, "eos_token_id", free.token_ids[60])
    texts = [begin(gpt2, lookup=lookup, stop_at_end=True) for lookup in (0, 8)]
    for text in ("", " Then"):
        for one in texts:
            if text:
                one.feed(text)
            "".join(one)
        assert texts[0].ids == texts[1].ids
        assert texts[0].method.fill == texts[1].method.fill


@pytest.mark.slow
def test_a_compiled_stream_may_look_up(models):
    ids = repeating(60)
    plain = make("streaming-llm", models["llama"])
    compiled = make("streaming-llm", models["llama"]).compile(backend="eager", fullgraph=True)
    tokens = [
        list(itertools.islice(kvalign.stream_tokens(method, ids, lookup=lookup), 80))
        for method, lookup in ((plain, 0), (compiled, 6))
    ]
    assert tokens[0] == tokens[1]


DRAWN = LogitsProcessorList([TemperatureLogitsWarper(0.4)])


class _Careless(Lookup):
    """Takes what was read ahead, whatever was chosen: text that is guessed is text that is said."""

    def feed(self, method):
        if method.cache.ahead is not None and method.cache.ahead.ids:
            return take_ahead(method.cache, method.cache.ahead.ids[0])
        return super().feed(method)


def second_tokens(lookup_class, num_draws, model, prompt):
    """How often each token is the second of so many draws: [V]."""
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(VOCAB)
    method = make("streaming-llm", model)
    for _ in range(num_draws):
        method.reset()
        method.feed(torch.tensor([prompt[:-1]]))
        lookup, token = lookup_class(4, prompt[:-1]), prompt[-1]
        row = Row(torch.tensor([prompt]), DRAWN, True, generator)
        for _ in range(2):
            lookup.append(token)
            row.take(lookup.feed(method), method)
            token = int(row.token)
        counts[token] += 1
    return counts


@pytest.mark.slow
def test_drawn_tokens_have_the_model_s_distribution(models):
    """Of the second token after a prompt that foretells two others, over all first ones: chi
    square, of as many degrees of freedom as tokens are likely; careless taking fails it.
    """
    model, prompt, num = models["llama"], [5, 6, 7, 8, 9, 5, 6, 7], 400
    method = make("streaming-llm", model)
    first = DRAWN(None, method.feed(torch.tensor([prompt]))).softmax(-1)
    method.select([0] * VOCAB)
    second = DRAWN(None, method.feed(torch.arange(VOCAB)[:, None])).softmax(-1)
    expected = (first @ second)[0] * num
    likely = expected > 5
    freedom = int(likely.sum())
    bound = freedom + 4 * (2 * freedom) ** 0.5

    def chi_square(lookup_class):
        counts = second_tokens(lookup_class, num, model, prompt)
        return ((counts - expected) ** 2 / expected)[likely].sum().item()

    assert freedom > 20 and chi_square(Lookup) < bound < chi_square(_Careless)


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


def test_rows_and_wrong_numbers_are_refused(loaded, ids, models):
    gpt2 = loaded["gpt2-mini"]
    with pytest.raises(UserError, match="^lookup is for one stream, got 2 rows"):
        next(kvalign.stream_tokens(make("window", models["gpt2"]), ids, lookup=4))
    batch = kvalign.stream_batch(gpt2.model, gpt2.tokenizer, [PROMPT], lookup=4)
    with pytest.raises(UserError, match="^lookup is for one stream: rows of a batch"):
        next(batch)
    with pytest.raises(
        UserError, match="^lookup does not work with recompute, cache of 24 entries"
    ):
        begin(gpt2, method="recompute", lookup=4)
    for wrong in (-1, MOST_GUESSED + 1):
        with pytest.raises(
            UserError, match=f"^lookup must be at least 0 and at most 64, got {wrong}"
        ):
            Sampling(lookup=wrong)
