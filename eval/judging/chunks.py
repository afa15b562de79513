"""Readability of a passage: the paper's rule (KV-Align 2024) for chunks of 10 NLTK tokens. A chunk
is readable if at least half of them are words or end a sentence. Text that repeats one word forever
passes, so repetition is reported beside it (distinct-n: Li et al. 2016; rep-4: Welleck et al.
2020).

Tokens are those of `nltk.word_tokenize` of NLTK 3.9: sentences by Punkt, then words by the rules of
the Penn Treebank. NLTK 3.10 also splits at dashes, at more apostrophes and after curly quotes. That
is undone here, and Punkt's parameters are shipped, so a text has the same tokens on every machine.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from nltk.stem.snowball import SnowballStemmer
from nltk.tabdata import PunktDecoder
from nltk.tokenize import NLTKWordTokenizer
from nltk.tokenize.punkt import PunktLanguageVars, PunktParameters, PunktSentenceTokenizer

from kvalign.eval.judging import Rule, data_of, readers_text

CHUNK_LEN = 10  # NLTK tokens

_STEM = functools.lru_cache(maxsize=2**16)(SnowballStemmer("english").stem)


class Chunk(NamedTuple):
    """Chunk of a passage: text[start:end], and how many of its tokens the rule knows."""

    start: int
    end: int
    num_tokens: int
    num_known: int
    is_readable: bool


def is_known(token: str, words: frozenset[str], rule: Rule) -> bool:
    """Return whether a lower-cased token, or its Snowball stem, is a word or a mark of the rule."""
    token = token.lower()
    return token in rule.marks or token in words or _STEM(token) in words


def chunks(text: str, words: frozenset[str], rule: Rule) -> list[Chunk]:
    """Chunks of 10 tokens of a passage; the rule says whether the rest is one more."""
    spans = [(*span, is_known(text[slice(*span)], words, rule)) for span in token_spans(text)]
    num_judged = len(spans) if rule.judges_rest else len(spans) // CHUNK_LEN * CHUNK_LEN
    parts = [spans[i : i + CHUNK_LEN] for i in range(0, num_judged, CHUNK_LEN)]
    counts = [(len(part), sum(known for *_, known in part)) for part in parts]
    return [
        Chunk(part[0][0], part[-1][1], num, num_known, 2 * num_known >= num)
        for part, (num, num_known) in zip(parts, counts, strict=True)
    ]


def unknown(text: str, words: frozenset[str], rule: Rule) -> list[tuple[int, int]]:
    """Start and end of the words of a text that the rule does not know."""
    return [
        (start, end)
        for start, end in token_spans(text)
        if any(map(str.isalpha, text[start:end])) and not is_known(text[start:end], words, rule)
    ]


def distinct(tokens: Sequence[str], n: int) -> float:
    """Share of distinct n-grams: 1 without repetition, and for a text without any."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def judged(text: str, words: frozenset[str], rule: Rule) -> dict[str, Any]:
    """Measures of a passage.

    Returns:
        num_chunks, num_readable (chunks), readable (their share), distinct_1, distinct_2,
        repetition (share of 4-grams that occurred before), text (as judged), and chunks: lists of
        start and end in the text, tokens, known tokens, and whether the chunk is readable.
    """
    text = readers_text(text)
    pieces = chunks(text, words, rule)
    tokens = [text[start:end].lower() for start, end in token_spans(text)]
    num_readable = sum(chunk.is_readable for chunk in pieces)
    return {
        "num_chunks": len(pieces),
        "num_readable": num_readable,
        "readable": num_readable / len(pieces) if pieces else 0.0,
        "distinct_1": distinct(tokens, 1),
        "distinct_2": distinct(tokens, 2),
        "repetition": 1 - distinct(tokens, 4),
        "text": text,
        "chunks": [[*chunk] for chunk in pieces],
    }


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
    return [line for line in data_of(f"punkt_english/{name}").split("\n") if line]
