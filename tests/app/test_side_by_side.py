"""Streams in turns are the streams alone; what a card says of one; text is escaped."""

import pytest

import kvalign
from kvalign.app.pages import render
from kvalign.app.pages.side_by_side import View, begin, side_by_side
from kvalign.eval.chunks import Chunk, chunks
from kvalign.eval.rules import RULES
from kvalign.eval.words import load_words
from kvalign.methods import METHODS
from kvalign.models import load_model

PROMPT = "The history of the island"
NAMES = ["window", "streaming-llm", "kvalign", "discard-half", "recompute"]
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


def test_all_grow_from_nothing_a_token_at_a_time(run):
    first, *later = run[1]
    assert all(
        (view.text, view.num_tokens, view.fill, view.chunks) == ("", 0, 0, []) for view in first
    )
    for before, after in zip([first, *later], later, strict=False):
        for a, b in zip(before, after, strict=True):
            assert b.text.startswith(a.text) and 0 <= b.num_tokens - a.num_tokens <= 4
    for views in run[1][:-1]:
        counts = [view.num_tokens for view in views if not view.is_done]
        assert max(counts, default=0) - min(counts, default=0) <= 4


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


def test_closing_ends_the_work(gpt2, words):
    streams = begin(gpt2, PROMPT, ["window", "recompute"], **SETTINGS)
    shown = side_by_side(streams, words, shown_every_s=0)
    for _ in range(5):
        next(shown)
    shown.close()
    assert [len(stream.token_ids) for stream in streams] == [4, 4]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(prompt=" \n"), "the prompt is empty"),
        (dict(methods=[]), "no method is chosen"),
        (dict(methods=["windows"]), "unknown method 'windows'"),
        (dict(seed=-1), "the seed must be at least 0"),
        (dict(seed=2**63), "the seed must be at least 0"),
        (dict(cache_size=512), "window: cache_size must be at most 511"),
        (dict(cache_size=300), "kvalign: cache_size must be at most 255"),
        (dict(num_evicted=25), "window: num_evicted must be between 1 and"),
        (dict(aligner="nowhere"), "kvalign: no aligner 'nowhere'"),
        (dict(top_k=-1), "top_k must be at least 0"),
    ],
)
def test_wrong_settings_are_one_line(gpt2, changes, expected):
    settings = dict(prompt=PROMPT, methods=["window", "kvalign"]) | SETTINGS | changes
    with pytest.raises(ValueError, match=expected) as error:
        begin(gpt2, **settings)
    assert "\n" not in str(error.value)


HOSTILE = '<script>alert(1)</script> & "quotes" </bdi> \x1b[1m \u202eleft'
ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &#34;quotes&#34; &lt;/bdi&gt; "
ESCAPED += "\u241b[1m [U+202E]left"


def test_text_is_escaped_and_coloured():
    text = f"good {HOSTILE} bad rest"
    found = [Chunk(0, 4, 10, 5), Chunk(len(text) - 8, len(text) - 5, 10, 4)]
    view = View("a <b>", "c <i>", text, found, 9, 41.6, 12, 48, 2, 30, False)
    html = render("cards.html", prompt=HOSTILE, views=[view])
    assert f'<bdi class="prompt">{ESCAPED}</bdi>' in html
    expected = f'<bdi class="readable">good</bdi> {ESCAPED} <bdi class="unreadable">bad</bdi>'
    assert f'{expected}<bdi class="tail"> rest</bdi>' in html
    assert (
        "a &lt;b&gt;" in html and "<b>" not in html and "<i>" not in html and "<script" not in html
    )
    for shown in ("<dd>9</dd>", "<dd>42</dd>", "<dd>50%</dd>", "2 <small>of 30</small>", "12 / 48"):
        assert shown in html
    assert 'style="width: 25.0%"' in html
    line = render("message.html", line=HOSTILE)
    assert ESCAPED in line and "<script" not in line
