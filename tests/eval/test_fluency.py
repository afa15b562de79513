"""The readability rule on fixed texts, worked out by hand; repetition; a passage's perplexity."""

import itertools
import math
import os
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import CONTEXT_LEN, tiny_model

from kvalign.eval.fluency import (
    Chunk,
    chunks,
    dense_perplexity,
    distinct,
    longest_run,
    measures,
    token_spans,
)
from kvalign.eval.words import load_words

# In neither list: `walks`, whose stem `walk` is, and `houses`, whose stem `hous` is not; `Zq`, `,`,
# `@`, `-` and numbers are no words.
TEXT = (
    "The old island was settled first . It walks twice "  # 10 of 10
    "Zq , @-@ 1984 , Zq the house "  # `@-@` is three tokens: 10, of which the last two are words
    "fell . Zq Zq Zq houses !"  # the last chunk: 7 tokens, of which fell . !
)
CHUNKS = [(10, 10, True), (10, 2, False), (7, 3, False)]
NLTK_DATA = os.environ.get("KVALIGN_TEST_NLTK_DATA", "")


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("english-words", None),
        pytest.param(
            "nltk",
            Path(NLTK_DATA),
            marks=pytest.mark.skipif(
                not NLTK_DATA, reason="KVALIGN_TEST_NLTK_DATA names no folder with NLTK's words"
            ),
        ),
    ],
)
def test_fixed_text_equals_the_count_by_hand(name, folder):
    words = load_words(name, folder).words
    assert len(words) > 200_000
    assert {"walk", "was", "fell"} <= words and not {"walks", "houses", "hous", "zq"} & words
    found = [(c.num_tokens, c.num_known, c.is_readable) for c in chunks(TEXT, words)]
    assert found == CHUNKS
    assert measures(TEXT, words)["readable"] == 1 / 3


def test_chunks_lie_where_their_tokens_are():
    found = chunks(TEXT, frozenset())
    assert TEXT[found[0].start : found[0].end] == TEXT[:50].strip()
    assert TEXT[found[2].start : found[2].end] == "fell . Zq Zq Zq houses !"
    assert all(a.end <= b.start for a, b in itertools.pairwise(found))
    assert chunks(" \n ", frozenset()) == []


def test_half_of_the_tokens_is_enough():
    assert Chunk(0, 9, num_tokens=10, num_known=5).is_readable
    assert not Chunk(0, 9, num_tokens=10, num_known=4).is_readable
    assert not Chunk(0, 9, num_tokens=5, num_known=2).is_readable


def test_tokens_are_nltks_and_sentences_end():
    text = "He said \"it's fine\". Don't panic (now). Dr…"
    found = [text[start:end] for start, end in token_spans(text)]
    expected = "He said \" it 's fine \" . Do n't panic ( now ) . Dr…"
    assert found == expected.split(" ")


def test_offline_list_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    monkeypatch.setattr("nltk.download", lambda *args, **kwargs: False)
    words = load_words("auto")
    assert words.name == "english-words web2" and "island" in words.words
    assert "english-words instead" in caplog.text
    with pytest.raises(FileNotFoundError, match="could not be fetched"):
        load_words("nltk")
    with pytest.raises(FileNotFoundError, match="words.zip"):
        load_words("auto", tmp_path)


def test_words_are_fetched_once(tmp_path, monkeypatch):
    """What NLTK's downloader leaves in its folder is what is read."""
    import zipfile

    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    calls = []

    def download(name, **kwargs):
        calls.append(name)
        (tmp_path / "corpora").mkdir()
        with zipfile.ZipFile(tmp_path / "corpora" / "words.zip", "w") as archive:
            archive.writestr("words/", "")
            archive.writestr("words/en", "island\nAnn\n")
        return True

    monkeypatch.setattr("nltk.download", download)
    for _ in range(2):
        words = load_words("auto")
        assert (words.name, words.words) == ("nltk words", {"island", "Ann"})
    assert calls == ["words"]


def test_repetition():
    tokens = "abcabcabcd"
    assert distinct(tokens, 1) == 0.4
    assert distinct(tokens, 2) == 4 / 9
    assert distinct(["a"], 2) == 1
    assert longest_run(tokens) == 9
    assert longest_run("xyyz") == 2
    assert longest_run("abcd") == 0
    assert longest_run("abcdeabcde") == 0  # longer than a phrase
    assert measures("the the the the the", frozenset({"the"}))["repetition"] == 0.5


@pytest.mark.parametrize(("num_prompt", "num_passage"), [(1, 1), (5, 40), (40, 120), (90, 30)])
def test_dense_perplexity_sees_half_a_span_or_all(num_prompt, num_passage, ids):
    model, span = tiny_model("gpt2"), CONTEXT_LEN // 2
    stream = ids[0, : num_prompt + num_passage]
    found = dense_perplexity(model, stream[:num_prompt], stream[num_prompt:], span)
    nll, scored = 0.0, num_prompt
    while scored < len(stream):  # the same windows, token by token
        end = min(len(stream), max(scored + span // 2, span))
        for i in range(scored, end):
            seen = stream[max(0, end - span) : i]
            assert len(seen) >= min(i, span // 2)
            logits = model(input_ids=seen[None]).logits[0, -1]
            nll -= logits.log_softmax(-1)[stream[i]].item()
        scored = end
    assert math.isclose(found, math.exp(nll / num_passage), rel_tol=1e-4)


def test_uniform_logits_have_the_perplexity_of_the_vocabulary(ids):
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    found = dense_perplexity(model, ids[0, :3], ids[0, 3:90], CONTEXT_LEN)
    assert math.isclose(found, model.config.vocab_size, rel_tol=1e-5)
