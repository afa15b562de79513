"""Tokens of a text, as `nltk.word_tokenize` of NLTK 3.9 makes them: sentences by Punkt, then words
by the rules of the Penn Treebank.

NLTK 3.10 also splits at dashes, at more apostrophes and after curly quotes. That is undone here,
and Punkt's parameters are shipped, so a text has the same tokens on every machine.
"""

import functools
import re
from importlib import resources
from typing import ClassVar

from nltk.tabdata import PunktDecoder
from nltk.tokenize import NLTKWordTokenizer
from nltk.tokenize.punkt import PunktLanguageVars, PunktParameters, PunktSentenceTokenizer

_DASH, _APOSTROPHE = "\u2014", "'x"


class _Words(NLTKWordTokenizer):
    """The rules but for that of dashes, and an opening apostrophe before a single letter only."""

    PUNCTUATION: ClassVar = [
        rule for rule in NLTKWordTokenizer.PUNCTUATION if not rule[0].fullmatch(_DASH)
    ]
    STARTING_QUOTES: ClassVar = [
        rule for rule in NLTKWordTokenizer.STARTING_QUOTES if not rule[0].match(_APOSTROPHE)
    ] + [(re.compile(r"(?i)(')(?!re|ve|ll|m|t|s|d|n)(\w)\b"), r"\1 \2")]


class _Language(PunktLanguageVars):
    """Language of the tokenizer: what ends a word and what closes a sentence, without curly
    quotes.
    """

    re_boundary_realignment = re.compile(r"[\"')\]}]+?(?:\s+|(?=--)|$)", re.MULTILINE)
    _re_non_word_chars = r"(?:[)\";}\]\*:@\'\({\[!?])"


def token_spans(text: str) -> list[tuple[int, int]]:
    """Start and end of each token in a text; tokens contain no spaces."""
    return [
        (start + left, start + right)
        for start, end in _punkt().span_tokenize(text)
        for left, right in _WORDS.span_tokenize(text[start:end])
    ]


_WORDS = _Words()


@functools.cache
def _punkt() -> PunktSentenceTokenizer:
    decoder, parameters = PunktDecoder(), PunktParameters()
    parameters.abbrev_types = decoder.txt2set(_lines("abbrev_types.txt"))
    parameters.sent_starters = decoder.txt2set(_lines("sent_starters.txt"))
    parameters.collocations = set(decoder.tab2tups(_lines("collocations.tab")))
    parameters.ortho_context = decoder.tab2intdict(_lines("ortho_context.tab"))
    return PunktSentenceTokenizer(parameters, lang_vars=_Language())


def _lines(name: str) -> list[str]:
    path = resources.files("kvalign.eval.judging") / "punkt_english" / name
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line]
