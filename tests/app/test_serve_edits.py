"""Edits of a session whose conversation a client has changed."""

import random

import pytest

from kvalign.app.serve.edits import RUN, edits_between


def applied(held, edits):
    held = list(held)
    for start, stop, new in reversed(edits.changes):
        held[start:stop] = new
    return held


def part(name, num=40):
    rng = random.Random(name)
    return [rng.randrange(1000) for _ in range(num)]


@pytest.mark.parametrize(
    ("held", "asked", "num_kept"),
    [
        ("abc", "abcd", 120),
        ("abc", "acd", 80),
        ("abc", "abxc", 119),
        ("abcd", "axcyd", 119),
        ("abc", "ab", 79),
        ("abc", "abc", 119),
        ("abc", "xyz", 0),
        ("abcb", "abd", 80),
        ("abab", "aab", 79),
    ],
)
def test_what_both_have_in_a_row_is_kept(held, asked, num_kept):
    one, other = ([x for name in names for x in part(name)] for names in (held, asked))
    edits = edits_between(one, other)
    assert edits.num_kept == num_kept
    assert applied(one, edits) == other[: edits.num_held] and edits.num_held < len(other)
    assert edits.num_held == edits.num_kept + edits.num_new


def test_any_two_texts():
    rng = random.Random(0)
    for _ in range(200):
        held = [rng.randrange(3) for _ in range(rng.randrange(90))]
        asked = [rng.randrange(3) for _ in range(rng.randrange(1, 90))]
        if rng.random() < 0.7:  # they share something
            at = rng.randrange(len(asked))
            asked[at:at] = held[rng.randrange(len(held) + 1) :]
        edits = edits_between(held, asked)
        assert applied(held, edits) == asked[: edits.num_held] and edits.num_held < len(asked)


def test_less_than_a_run_is_not_looked_for():
    middle = part("b", RUN - 1)
    held, asked = [*part("a"), *middle], [*part("a"), *part("x"), *middle, 1]
    assert edits_between(held, asked).num_kept == 40
