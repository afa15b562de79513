"""Streams in turns are the streams alone; what a card says of one; text is escaped."""

from math import exp

import pytest
import torch

import kvalign
from kvalign.app.pages import render
from kvalign.app.pages import side_by_side as side_by_side_module
from kvalign.app.pages.reread import Reread
from kvalign.app.pages.side_by_side import Refusal, View, begin, side_by_side, verdict
from kvalign.eval.judging.chunks import Chunk, chunks
from kvalign.eval.judging.rules import RULES
from kvalign.eval.judging.words import load_words
from kvalign.methods import make_method
from kvalign.methods.registry import METHODS
from kvalign.models.loading import load_model
from kvalign.streaming.scoring import score

pytestmark = pytest.mark.slow
PROMPT = "The history of the island"
NAMES = ["window", "streaming-llm", "kvalign", "discard-half", "recompute"]
NETWORK = "kvalign-gpt2-mini-network"
SETTINGS = dict(cache_size=24, num_evicted=3, max_new_tokens=50, top_k=20)


@pytest.fixture(scope="module")
def gpt2():
    return load_model("gpt2-mini")


@pytest.fixture(scope="module")
def words():
    return load_words().words


@pytest.fixture(scope="module")
def run(gpt2, words):
    """The streams and all views of one run."""
    streams = begin(gpt2, PROMPT, NAMES, seed=3, **SETTINGS)
    return streams, list(side_by_side(streams, words, shown_every_s=0))


def test_turns_change_nothing(gpt2, run):
    for name, view in zip(NAMES, run[1][-1], strict=True):
        fixed = {"num_evicted": None} if "num_evicted" in METHODS[name].fixed else {}
        alone = kvalign.stream(
            gpt2.model, gpt2.tokenizer, PROMPT, method=name, seed=3, **(SETTINGS | fixed)
        )
        assert view.text == "".join(alone)
        assert (view.num_tokens, view.is_done, view.title) == (50, True, alone.method.title)


def test_figures_are_those_of_the_method(run):
    streams, views = run
    for stream, view in zip(streams, views[-1], strict=True):
        assert view.tokens_per_s == 1e3 / stream.timing()["ms_per_token"]
        assert view.fill == stream.method.fill and view.cache_size == 24
        dropped = stream.num_fed - view.fill
        assert view.num_evictions * view.num_evicted == dropped > 0
    cached = {view.title: view.num_evictions for view in views[-1]}
    assert cached["window"] == streams[0].method.cache.num_evictions
    assert views[-1][3].num_evicted == 10  # half the window of discard-half


def test_finished_chunks_are_judged(run, words):
    for views in run[1]:
        for view in views:
            found = chunks(view.text, words, RULES["paper"])
            assert view.chunks == (found if view.is_done else found[:-1])
    readable = [chunk.is_readable for chunk in view.chunks]
    assert view.readable == sum(readable) / len(readable)


def test_closing_ends_the_work(gpt2, words, monkeypatch):
    monkeypatch.setattr(side_by_side_module, "WORK_PER_SHOWING", 0)  # a view after each turn
    streams = begin(gpt2, PROMPT, ["window", "recompute"], **SETTINGS)
    shown = side_by_side(streams, words, shown_every_s=0)
    for _ in range(5):
        next(shown)
    shown.close()
    assert [len(stream.token_ids) for stream in streams] == [4, 4]


@pytest.mark.parametrize(
    ("changes", "refusing", "expected"),
    [
        (dict(cache_size=512), ["window", "kvalign"], "cache_size must be at most"),
        (dict(cache_size=300), ["kvalign"], "cache_size must be at most 255"),
        (dict(aligner="nowhere"), ["kvalign"], "no aligner 'nowhere'"),
        (dict(policy="tova", aligner=NETWORK), ["kvalign"], "an aligner of kind network moves"),
        (dict(positions="keep"), ["kvalign"], "positions=keep leaves entries at their original"),
    ],
)
def test_one_that_refuses_does_not_hold_up_the_others(gpt2, words, changes, refusing, expected):
    settings = SETTINGS | dict(max_new_tokens=3) | changes
    streams = begin(gpt2, PROMPT, sorted({"window", "kvalign", *refusing}), **settings)
    *_, last = side_by_side(streams, words)
    refusals = [one for one in last if isinstance(one, Refusal)]
    assert {one.title for one in refusals} == set(refusing)
    assert all(one.line.startswith(expected) and "\n" not in one.line for one in refusals)
    assert all(one.num_tokens == 3 for one in last if isinstance(one, View))


@pytest.mark.slow
def test_kept_positions_end_with_the_context(gpt2, words):
    """A stream ends there, and says so; a prompt that goes beyond becomes a refusal."""
    settings = SETTINGS | dict(policy="key-norm", positions="keep", max_new_tokens=600)
    num_tokens = len(gpt2.tokenizer(PROMPT).input_ids)
    prompts = (PROMPT * (500 // num_tokens), PROMPT * (530 // num_tokens + 1))
    lasts = []
    for prompt in prompts:
        *_, last = side_by_side(begin(gpt2, prompt, ["window"], **settings), words)
        lasts += last
    ended, refusal = lasts
    assert ended.policy == "policy key-norm, positions kept; the last one is reached"
    assert ended.is_done and 0 < ended.num_tokens < 600
    assert refusal.title == "window"
    assert refusal.line.startswith("positions=keep ends with the 512 positions of this model")


@pytest.mark.slow
def test_read_again_as_recompute_reads(gpt2, run):
    """Token by token where a quarter of the cache is one entry, in whatever parts it comes."""
    ids = run[0][0].ids
    for cache_size, num_evicted in ((7, 1), (24, 6)):
        first = 30
        method = make_method(
            "recompute", gpt2.model, cache_size=cache_size, num_evicted=num_evicted
        )
        begun = first - cache_size - 1
        expected = exp(score(method, torch.tensor([ids[begun:]])).mean())
        if num_evicted == 1:
            reread = Reread(gpt2.model, cache_size, first)
            for end in (20, 33, 34, 50, len(ids)):
                reread.read(ids[:end])
        else:
            reread = Reread(gpt2.model, cache_size, first)
            reread.read(ids, is_done=True)
        assert reread.num_read == len(ids) - first
        assert reread.perplexity == pytest.approx(expected, rel=1e-5)


def test_perplexity_is_of_what_was_written(run):
    streams, views = run
    assert all(view.perplexity is None for view in views[0])
    for stream, view in zip(streams, views[-1], strict=True):
        reread = Reread(stream.method.model, 24, len(stream.ids) - view.num_tokens)
        reread.read(stream.ids, is_done=True)
        assert view.perplexity == pytest.approx(reread.perplexity, rel=0.02)  # cut elsewhere
    assert verdict(views[0]) is None
    least, most = (pick(views[-1], key=lambda view: view.perplexity) for pick in (min, max))
    said = verdict([*views[-1], Refusal("dense", "", "no")])
    assert said.startswith(
        f"The text of {least.title} surprises the model least when it reads it again"
    )
    times = f"of {most.title} {most.perplexity / least.perplexity:.1f} times as much"
    assert said.endswith(f"{times}: few tokens, so this may be chance.")


HOSTILE = '<script>alert(1)</script> & "quotes" </bdi> \x1b[1m \u202eleft'
ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &#34;quotes&#34; &lt;/bdi&gt; "
ESCAPED += "\u241b[1m [U+202E]left"


def test_text_is_escaped_and_coloured():
    text = f"good {HOSTILE} bad rest"
    found = [Chunk(0, 4, 10, 5), Chunk(len(text) - 8, len(text) - 5, 10, 4)]
    view = View("a <b>", "c <i>", "e <b>", text, found, 9, 41.6, 31.42, 12, 48, 2, 30, False)
    refusal = Refusal("d <b>", "e <i>", "must be <u>")
    html = render(
        "cards.html",
        prompt=HOSTILE,
        views=[view, refusal],
        seed=7,
        verdict=None,
        labelled=str.title,
    )
    assert f'<bdi class="prompt">{ESCAPED}</bdi>' in html
    expected = f'<bdi class="readable">good</bdi> {ESCAPED} <bdi class="unreadable">bad</bdi>'
    assert f'{expected}<bdi class="tail"> rest</bdi>' in html
    assert (
        "a &lt;b&gt;" in html and "<b>" not in html and "<i>" not in html and "<script" not in html
    )
    figures = ("<dd>9</dd>", "<dd>42</dd>", "<dd>50%</dd>", "<dd>31.4</dd>")
    for shown in (*figures, "2 evictions of 30", "12 / 48", "seed 7", "Must Be &lt;U&gt;"):
        assert shown in html
    assert 'style="width: 25.0%"' in html
    line = render("message.html", line=HOSTILE)
    assert ESCAPED in line and "<script" not in line


@pytest.mark.slow
def test_no_seed_is_one_random_seed_for_all(gpt2):
    seeds = [
        {one.sampling.seed for one in begin(gpt2, PROMPT, ["window", "recompute"], **SETTINGS)}
        for _ in range(2)
    ]
    assert [len(both) for both in seeds] == [1, 1] and seeds[0] != seeds[1]
