"""The stream of facts and questions: what it says is so, and a tokenizer reads it as it was."""

from itertools import chain

import numpy as np
import pytest

from kvalign.data_gen import corpus
from kvalign.data_gen.corpora import texts, token_pieces
from kvalign.data_gen.facts import (
    ANSWER,
    END,
    NUM_KEYS,
    NUM_VALUES,
    QUESTION,
    WORDS,
    FactStreams,
    ages,
    recall_tokenizer,
)


def test_answers_are_the_values_that_keys_were_given_last():
    for ids in FactStreams(0, num_rows=3).take(2000).tolist():
        given, told, num_checked = {}, set(), 0
        for i, (token, age) in enumerate(zip(ids, ages(ids), strict=True)):
            if token < QUESTION:
                key, value = divmod(token, NUM_VALUES)
                given[key] = i, value
                told.discard(key)
            elif token >= ANSWER and i:
                key = ids[i - 1] - QUESTION
                if key in given:
                    at, value = given[key]
                    assert token - ANSWER == value
                    assert age == (0 if key in told else i - 1 - at)
                    num_checked += age > 0
                told.add(key)
            else:
                assert age == 0
        assert num_checked > 200


@pytest.mark.parametrize("max_age", [40, 256])
def test_facts_of_all_ages_are_asked_for(max_age):
    found = np.array(ages(FactStreams(1, max_age=max_age).take(20_000)[0].tolist()))
    counts = np.histogram(found[found > 0], bins=4, range=(0, max_age))[0]
    assert counts.min() > counts.max() / 5 and found.max() < 1.5 * max_age


def test_a_stream_goes_on_where_it_ended_and_begins_anywhere():
    whole, parts = (FactStreams(2, num_rows=40) for _ in range(2))
    first = whole.take(5)
    assert np.array_equal(first, parts.take(5)) and whole.take(3).shape == (40, 3)
    kinds = {(token >= QUESTION) + (token >= ANSWER) for token in first[:, 0].tolist()}
    assert kinds == {0, 1, 2}


def test_the_corpus_is_tokens_of_its_own(monkeypatch):
    monkeypatch.setattr(corpus, "RECALL_LEN", {"train": 3968, "test": 3968})
    tokenizer = recall_tokenizer(256)
    (text,) = texts("recall", "test")
    ids = list(chain(*token_pieces("recall", tokenizer, "test")))
    assert len(ids) == 3968 and max(ids) < len(WORDS) - 1
    assert text.split() == [WORDS[i] for i in ids]
    assert tokenizer.decode(ids[:9]) == " ".join(WORDS[i] for i in ids[:9])
    assert tokenizer("k7=3 island")["input_ids"] == [7 * 8 + 3, WORDS.index(END)]
    assert text[:100] not in next(texts("recall", "train"))


@pytest.mark.parametrize(("max_age", "num_resting"), [(256, 4), (4096, 32)])
def test_keys_that_rest_are_asked_for_once_at_all_ages(max_age, num_resting):
    rows = FactStreams(3, 4, max_age, resting=True).take(8192).tolist()
    found = np.array([age for row in rows for age in ages(row) if age])
    assert found.max() > 0.9 * max_age
    # In time: as often in the last octave as in the one before it.
    bands = [((found > low) & (found <= 2 * low)).sum() for low in (max_age // 4, max_age // 2)]
    assert min(bands) > 40 and max(bands) < 2 * min(bands)
    for row in rows:
        told = [token // NUM_VALUES for token in row if token < QUESTION]
        asked = [token - QUESTION for token in row if QUESTION <= token < ANSWER]
        for key in range(NUM_KEYS - num_resting, NUM_KEYS):
            assert abs(told.count(key) - asked.count(key)) <= 1
    plain = FactStreams(3, 4, max_age).take(8192).tolist()
    assert max_age == 256 or max(age for row in plain for age in ages(row)) < 0.9 * max_age
