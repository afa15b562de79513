"""The readability rules on fixed texts, worked out by hand; tokens, the word list, repetition; the
counts of the paper's authors on their own texts.
"""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvalign.eval.judging import RULES, WORD_LIST, load_words, readers_text
from kvalign.eval.judging.chunks import chunks, distinct, judged, token_spans
from kvalign.foundation.errors import UserError

# In the list: not `walks`, whose stem `walk` is, nor `houses`, whose stem `hous` is not; `Zq`, `@`,
# `-` and numbers are no words, and `,` counts by the authors' rule alone.
TEXT = (
    "The old island was settled first . It walks twice "  # 10 of 10
    "Zq , @ - @ 1984 , Zq , house it "  # 11 so far, the last of them `it`
    "fell . Zq Zq Zq houses !"
)
PAPER = [(10, 10, True), (10, 1, False), (8, 4, True)]  # the last: it fell . !
AUTHORS = [(10, 10, True), (10, 4, False)]  # three commas more; 8 tokens are no chunk
AUTHORS_FILES = os.environ.get("KVALIGN_TEST_READABILITY", "")


@pytest.mark.parametrize(("rule", "expected"), [("paper", PAPER), ("authors", AUTHORS)])
def test_fixed_text_equals_the_count_by_hand(rule, expected):
    words = load_words()
    assert {"walk", "was", "fell"} <= words and not {"walks", "houses", "hous", "zq"} & words
    found = chunks(TEXT, words, RULES[rule])
    assert [(c.num_tokens, c.num_known, c.is_readable) for c in found] == expected
    passage = judged(TEXT, words, RULES[rule])
    assert passage["num_readable"] == sum(good for *_, good in expected)
    assert passage["readable"] == passage["num_readable"] / len(expected)


def test_chunks_lie_where_their_tokens_are():
    found = chunks(TEXT, frozenset(), RULES["paper"])
    assert TEXT[found[0].start : found[0].end] == TEXT[:50].strip()
    assert TEXT[found[2].start : found[2].end] == "it fell . Zq Zq Zq houses !"
    assert all(a.end <= b.start for a, b in itertools.pairwise(found))
    assert all(chunks(" \n ", frozenset(), rule) == [] for rule in RULES.values())


def test_tokens_are_those_of_nltk_3_9():
    """Sentences end, but not after an abbreviation; dashes within words do not split."""
    for text, expected in [
        (
            "He said \"it's fine\". Don't panic (now). Dr…",
            "He said \" it 's fine \" . Do n't panic ( now ) . Dr…",
        ),
        ("Mr. Smith left. He cannot go.", "Mr. Smith left . He can not go ."),
        ("sea\u2014land 'tis a -- b; c:d", "sea\u2014land 't is a -- b ; c : d"),
        ("He \u201cleft.\u201d She stayed.", "He \u201c left. \u201d She stayed ."),
    ]:
        assert [text[start:end] for start, end in token_spans(text)] == expected.split(" ")


@given(st.text(st.sampled_from("aB.?!,;:'\"`()[]{}<>-*@#$%& \n\u2019\u201c\u201d\u2014n't1é")))
def test_tokens_are_the_text_but_for_space(text):
    spans = token_spans(text)
    gaps = [0, *itertools.chain(*spans), len(text)]
    assert all(start < end for start, end in spans)
    assert not any(text[a:b].strip() for a, b in zip(gaps[::2], gaps[1::2], strict=True))


def test_word_list_is_pinned(monkeypatch):
    assert len(load_words()) == WORD_LIST["num_words"]
    load_words.cache_clear()
    monkeypatch.setattr("kvalign.eval.judging.data_of", lambda name: "+behaviour")
    with pytest.raises(UserError, match=r"not the pinned one .* pip install english-words==2.0.2"):
        load_words()
    monkeypatch.undo()
    assert load_words()


def authors_names():
    for model, mode, limit in itertools.product(("gpt2", "rope"), ("kv", "sw"), (False, True)):
        text = f"{model}_{mode}_10000_cache_64_limit_{limit}.txt"
        yield text, f"is_readable_model_{model}_mode_{mode}_limit_2gram_{limit}.npy"


@pytest.mark.skipif(
    not AUTHORS_FILES,
    reason="KVALIGN_TEST_READABILITY names no folder of the authors' texts and verdicts",
)
@pytest.mark.parametrize(("text", "verdicts"), authors_names())
def test_authors_rule_gives_their_verdict_of_each_chunk(text, verdicts):
    passage = (Path(AUTHORS_FILES) / text).read_text(encoding="utf-8")
    theirs = np.load(Path(AUTHORS_FILES) / verdicts, allow_pickle=False)
    ours = [chunk.is_readable for chunk in chunks(passage, load_words(), RULES["authors"])]
    assert ours == theirs.tolist()


def test_repetition():
    tokens = "abcabcabcd"
    assert distinct(tokens, 1) == 0.4
    assert distinct(tokens, 2) == 4 / 9
    assert distinct(["a"], 2) == 1
    passage = judged("the the the the the", frozenset({"the"}), RULES["paper"])
    assert passage["repetition"] == 0.5


def test_marks_of_wikitext_are_taken_out():
    text = "the <unk> well @-@ known island , 1 @,@ 000 miles"
    assert readers_text(text) == "the well-known island , 1,000 miles"
