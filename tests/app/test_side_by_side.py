"""Streams in turns are the streams alone; what a card says of one; text is escaped."""

from math import exp

import pytest
import torch

import kvalign
from kvalign.app.pages.side_by_side import Refusal, Reread, View, begin, side_by_side
from kvalign.eval.judging.words import load_words
from kvalign.methods import make_method
from kvalign.methods.registry import METHODS
from kvalign.streaming.scoring import score

pytestmark = pytest.mark.slow
PROMPT = "The history of the island"
NAMES = ["window", "kvalign", "discard-half", "recompute"]
SETTINGS = dict(cache_size=24, num_evicted=3, max_new_tokens=36, top_k=20)


@pytest.fixture(scope="module")
def words():
    return load_words().words


@pytest.fixture(scope="module")
def run(loaded, words):
    """The streams and the views of one run."""
    streams = begin(loaded, PROMPT, NAMES, seed=3, **SETTINGS)
    return streams, list(side_by_side(streams, words))


def test_turns_change_nothing(loaded, run):
    for name, view in zip(NAMES, run[1][-1], strict=True):
        fixed = {"num_evicted": None} if "num_evicted" in METHODS[name].fixed else {}
        alone = kvalign.stream(
            loaded.model, loaded.tokenizer, PROMPT, method=name, seed=3, **(SETTINGS | fixed)
        )
        assert view.text == "".join(alone)
        assert (view.num_tokens, view.is_done, view.title) == (36, True, alone.method.title)


@pytest.mark.parametrize(
    ("changes", "refusing", "expected"),
    [
        (dict(cache_size=512), ["window", "kvalign"], "cache_size must be at most"),
        (dict(aligner="nowhere"), ["kvalign"], "no aligner 'nowhere'"),
    ],
)
def test_one_that_refuses_does_not_hold_up_the_others(loaded, words, changes, refusing, expected):
    settings = SETTINGS | dict(max_new_tokens=3) | changes
    streams = begin(loaded, PROMPT, sorted({"window", "kvalign", *refusing}), **settings)
    *_, last = side_by_side(streams, words)
    refusals = [one for one in last if isinstance(one, Refusal)]
    assert {one.title for one in refusals} == set(refusing)
    assert all(one.line.startswith(expected) and "\n" not in one.line for one in refusals)
    assert all(one.num_tokens == 3 for one in last if isinstance(one, View))


def test_read_again_as_recompute_reads(loaded, run):
    """Token by token where a quarter of the cache is one entry, in whatever parts it comes."""
    ids = run[0][0].ids
    for cache_size, num_evicted in ((7, 1), (24, 6)):
        first = 30
        method = make_method(
            "recompute", loaded.model, cache_size=cache_size, num_evicted=num_evicted
        )
        begun = first - cache_size - 1
        expected = exp(score(method, torch.tensor([ids[begun:]])).mean())
        reread = Reread(loaded.model, cache_size, first)
        for end in (20, 33, 34, 36) if num_evicted == 1 else ():
            reread.read(ids[:end])
        reread.read(ids, is_done=True)
        assert reread.num_read == len(ids) - first
        assert reread.perplexity == pytest.approx(expected, rel=1e-5)
