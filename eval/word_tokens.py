"""The tokens of a text, as `nltk.word_tokenize` of NLTK 3.9 cuts it: sentences by Punkt, then words
by the rules of the Penn Treebank.

The rules are those of `NLTKWordTokenizer` (NLTK Project, Apache-2.0), kept here because NLTK
changes them: 3.10 splits at dashes and lets curly quotes end a sentence, and one token more moves
all the chunks that follow. Punkt's parameters are shipped. So a text has the same tokens on every
machine.
"""

import functools
import re
from collections.abc import Iterator
from importlib import resources

from nltk.tokenize.punkt import PunktLanguageVars, PunktParameters, PunktSentenceTokenizer

# In this order, each over the whole sentence; a space is where a token ends.
_RULES = [
    # opening quotes
    ("([«“\u2018„]|[`]+)", r" \1 "),
    (r"^\"", "``"),
    (r"(``)", r" \1 "),
    (r"([ \(\[{<])(\"|'{2})", r"\1 `` "),
    (r"(?i)(')(?!re|ve|ll|m|t|s|d|n)(\w)\b", r"\1 \2"),
    # punctuation, the last full stop apart
    (r"([^\.])(\.)([\]\)}>\"'»”\u2019 ]*)\s*$", r"\1 \2 \3 "),
    (r"([:,])([^\d])", r" \1 \2"),
    (r"([:,])$", r" \1 "),
    (r"\.{2,}", r" \g<0> "),
    (r"[;@#$%&]", r" \g<0> "),
    (r"([^\.])(\.)([\]\)}>\"']*)\s*$", r"\1 \2\3 "),
    (r"[?!]", r" \g<0> "),
    (r"([^'])' ", r"\1 ' "),
    (r"[*]", r" \g<0> "),
    (r"[\]\[\(\)\{\}\<\>]", r" \g<0> "),
    ("--", " -- "),
    (r"^|$", " "),
    # closing quotes, and what an apostrophe cuts off
    ("([»”\u2019])", r" \1 "),
    ("''", " '' "),
    ('"', " '' "),
    (r"\s+", " "),
    (r"([^' ])('[sS]|'[mM]|'[dD]|') ", r"\1 \2 "),
    (r"([^' ])('ll|'LL|'re|'RE|'ve|'VE|n't|N'T) ", r"\1 \2 "),
    # contractions
    (r"(?i)\b(can)(not)\b", r" \1 \2 "),
    (r"(?i)\b(d)('ye)\b", r" \1 \2 "),
    (r"(?i)\b(gim)(me)\b", r" \1 \2 "),
    (r"(?i)\b(gon)(na)\b", r" \1 \2 "),
    (r"(?i)\b(got)(ta)\b", r" \1 \2 "),
    (r"(?i)\b(lem)(me)\b", r" \1 \2 "),
    (r"(?i)\b(more)('n)\b", r" \1 \2 "),
    (r"(?i)\b(wan)(na)(?=\s)", r" \1 \2 "),
    (r"(?i) ('t)(is)\b", r" \1 \2 "),
    (r"(?i) ('t)(was)\b", r" \1 \2 "),
]
_COMPILED = [(re.compile(pattern), cut) for pattern, cut in _RULES]
_QUOTE = re.compile("``|''|\"")  # what the rules write for a double quote is one of these


def token_spans(text: str) -> list[tuple[int, int]]:
    """Where the tokens of a text lie: its characters but for the spaces between them."""
    return [
        (start + left, start + right)
        for start, end in _punkt().span_tokenize(text)
        for left, right in _in_sentence(text[start:end])
    ]


def _in_sentence(sentence: str) -> Iterator[tuple[int, int]]:
    cut, end = sentence, 0
    for pattern, replacement in _COMPILED:
        cut = pattern.sub(replacement, cut)
    for token in cut.split():
        if quote := _QUOTE.fullmatch(token):
            quote = _QUOTE.search(sentence, end)
            assert quote
            start, end = quote.span()
        else:
            start = sentence.index(token, end)
            end = start + len(token)
        yield start, end


class _Language(PunktLanguageVars):
    """What ends a word and what closes a sentence, without curly quotes."""

    re_boundary_realignment = re.compile(r"[\"')\]}]+?(?:\s+|(?=--)|$)", re.MULTILINE)
    _re_non_word_chars = r"(?:[)\";}\]\*:@\'\({\[!?])"


@functools.cache
def _punkt() -> PunktSentenceTokenizer:
    parameters = PunktParameters()
    parameters.abbrev_types.update(_lines("abbrev_types.txt"))
    parameters.sent_starters.update(_lines("sent_starters.txt"))
    parameters.collocations.update(
        (first, second)
        for first, _, second in (line.partition("\t") for line in _lines("collocations.tab"))
    )
    for line in _lines("ortho_context.tab"):
        word, _, flags = line.partition("\t")
        parameters.ortho_context[word] = int(flags)
    return PunktSentenceTokenizer(parameters, lang_vars=_Language())


def _lines(name: str) -> list[str]:
    path = resources.files("kvalign.eval") / "punkt_english" / name
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line]
