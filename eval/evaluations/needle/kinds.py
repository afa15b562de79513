"""Kinds of questions of RULER (Hsieh et al. 2024, arXiv 2404.06654), with few keys, values and
hops, and short lists, so that small models can answer.
"""

import string
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import NamedTuple

NUM_VALUES, NUM_HOPS, NUM_COMMON, NUM_FREQUENT = 4, 4, 10, 3
COMMON_TIMES = 6
"""Times that a list has a common word; others are there once."""
TIMES = [round(24 / rank**1.5) for rank in range(1, 9)]
"""Times that a text has each coded word: 24, 8, 5, 3, 2, 2, 1, 1, by Zipf's law."""
LETTERS = 5  # of a coded word or variable
WORDS = (
    "apple army baby bank bird blood bread bridge camera castle chair church city coffee country "
    "daughter desk doctor dream engine farm finger fish forest friend garden glass gold heart hill "
    "horse island judge king lake letter lion market milk money mountain music north ocean paper "
    "party pencil picture queen rain river school shoe snow song stone storm student summer table "
    "teacher tree village window winter world"
)


class Hidden(NamedTuple):
    """Passage in pieces, each tokenised alone, as its answers are; and the question for them."""

    passage: list[str]
    question: str
    answers: list[str]


def _code(rng: Random) -> str:
    return f" {rng.randrange(10_000, 100_000)}"


def _coded(num: int, rng: Random) -> list[str]:
    return [f" {''.join(rng.choices(string.ascii_uppercase, k=LETTERS))}" for _ in range(num)]


def _told(codes: dict[str, str]) -> list[str]:
    """Sentences, sorted by names: those were drawn, so the first that was drawn is anywhere."""
    pieces = list[str]()
    for name, code in sorted(codes.items()):
        again = f" . Remember : the secret code of the {name} is"
        pieces += [f"\n The secret code of the {name} is", code, again, code, " . \n"]
    return pieces


def one_code(names: list[str], rng: Random) -> Hidden:
    """Codes of names, and the question for one of them."""
    codes, asked = {name: _code(rng) for name in names}, names[0]
    return Hidden(_told(codes), f"\n The secret code of the {asked} is", [codes[asked]])


def all_codes(names: list[str], rng: Random) -> Hidden:
    """The same, and the question for all of them."""
    codes = {name: _code(rng) for name in names}
    asked = f"{', the '.join(names[:-1])} and the {names[-1]}"
    question = f"\n The secret codes of the {asked} are , in this order :"
    return Hidden(_told(codes), question, list(codes.values()))


def all_values(names: list[str], rng: Random) -> Hidden:
    """Several codes of one name."""
    codes, begin = [_code(rng) for _ in range(NUM_VALUES)], "One of the secret codes of the"
    passage = [piece for code in codes for piece in (f"\n {begin} {names[0]} is", code, " .")]
    question = f"\n The secret codes of the {names[0]} are all of these :"
    return Hidden([*passage, " \n"], question, codes)


def variables(names: list[str], rng: Random) -> Hidden:
    """A variable with a value, and others that get it from each other."""
    value, chain = _code(rng), _coded(1 + NUM_HOPS, rng)
    passage = ["\n VAR", chain[0], " =", value, " ."]
    for old, new in pairwise(chain):
        passage += ["\n VAR", new, " = VAR", old, " ."]
    question = f"\n The {len(chain)} variables that have the value{value} are VAR"
    return Hidden([*passage, " \n"], question, chain)


def common_words(names: list[str], rng: Random) -> Hidden:
    """A list of words of which some occur often."""
    words = [f" {word}" for word in WORDS.split()]
    rng.shuffle(words)
    common = words[:NUM_COMMON]
    passage = common * COMMON_TIMES + words[NUM_COMMON:]
    rng.shuffle(passage)
    question = f"\n The {NUM_COMMON} most common words of the list :"
    return Hidden(["\n List of words :", *passage, " . \n"], question, common)


def frequent_words(names: list[str], rng: Random) -> Hidden:
    """Coded words, each less frequent than the one before."""
    words = _coded(len(TIMES), rng)
    passage = [word for word, times in zip(words, TIMES, strict=True) for _ in range(times)]
    rng.shuffle(passage)
    question = f"\n The {NUM_FREQUENT} most common words of the coded text are the words"
    return Hidden(["\n Coded text :", *passage, " . \n"], question, words[:NUM_FREQUENT])


HIDE: dict[str, Callable[[list[str], Random], Hidden]] = {
    "single": one_code,
    "multi-key": one_code,
    "multi-value": all_values,
    "multi-query": all_codes,
    "variable-tracking": variables,
    "common-words": common_words,
    "frequent-words": frequent_words,
}
"""By kind what makes a passage and its question from names, which some kinds need."""
