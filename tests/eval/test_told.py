"""Conversations of `kvalign eval told`, and its answers against a reader that can do the task."""

import json

import pytest
from helpers.reader import Reader

from kvalign.app.cli.main import main
from kvalign.eval.evaluations import told
from kvalign.eval.protocol.data import SIZES
from kvalign.eval.protocol.document import document as make_document
from kvalign.eval.protocol.questions import rows_of
from kvalign.foundation import progress

MODEL = "llama-mini"
SMALL = dict(cache_sizes=(40,), talk=(0, 3, 8), num_conversations=3, passage_len=30)
ENDS = ("accuracy", "accuracy_low", "accuracy_high", "exact", "exact_low", "exact_high")


@pytest.fixture(scope="module")
def talks(loaded):
    return told.conversations(told.ToldSettings(**SMALL), loaded)


class FactReader(Reader):
    """Finds the end of a fact that it is asked for."""

    def answer(self, text, logits):
        begin = text.rpartition("ASSISTANT: ")[2].strip()
        found = text.find(f"USER: {begin}")
        if found >= 0 and any(begin == fact for fact, *_ in told.FACTS):
            end = text[found + 6 + len(begin) :].partition(".")[0]
            words, alone = self.ids_of(f" {begin}{end}."), self.ids_of(f" {begin}")
            logits[words[len(alone)]] = 1
        else:
            logits[7] = 1  # and of the eight words the first


def test_what_is_said(loaded, talks):
    decode = loaded.tokenizer.decode
    for talk in talks:
        facts = decode(talk.facts)
        for (begin, asked, words), question in zip(told.FACTS, talk.questions, strict=True):
            told_word = words.split()[question.right]
            assert f"USER: {begin} {told_word}.\n\nASSISTANT: " in facts
            assert decode(question.ids) == f"\n\nUSER: {asked}\n\nASSISTANT: {begin}"
            assert decode(question.words[question.right]).strip() in told_word
            assert len(set(question.words)) == 8
        assert all(decode(turn).startswith(f"\n\nUSER: {told.READ_OUT[:-2]}") for turn in talk.talk)
        for num in (0, 1, 120, 320):
            turns = talk.talk_of(num)
            assert sum(map(len, turns)) >= num
            assert sum(map(len, turns[:-1])) < max(num, 1)
    assert len({decode(talk.facts) for talk in talks}) == 3
    assert len({tuple(turn) for talk in talks for turn in talk.talk}) == sum(
        len(talk.talk) for talk in talks
    )


@pytest.mark.parametrize(("memory_len", "expected"), [(10_000, [1, 1, 1]), (300, [1, None, 0])])
def test_a_reader_is_right_where_it_has_the_facts(memory_len, expected, loaded, talks):
    method = FactReader(loaded, memory_len)
    with progress.shown_as("told") as bar:
        stops = [talk.stops([0, 3, 8], 40) for talk in talks]
        rows = rows_of(method, stops, bar)
    by_chance = sum(q.right == 0 for talk in talks for q in talk.questions) / 24
    for row, right in zip(rows, expected, strict=True):
        assert row["num_questions"] == 24 and row["accuracy_low"] <= row["accuracy"]
        if right is not None:
            assert row["exact"] == right
            assert row["accuracy"] == pytest.approx(max(right, by_chance))
        assert row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"]
    # Each token of the conversation is fed once, and each question three times.
    length = sum(len(talk.facts) + sum(map(len, talk.talk)) for talk in talks)
    asked = sum(len(question.ids) for talk in talks for question in talk.questions)
    assert method.num_fed == length + 3 * asked
    assert rows[-1]["num_tokens"] == pytest.approx(length / 3)


@pytest.mark.slow
def test_the_command(loaded, tmp_path, capsys, caplog):
    flags = "--model llama-mini --cache-sizes 40 --talk 8,1,1 --passage-len 30"
    flags += " --num-conversations 1 --methods dense,streaming-llm --memory 0,2000"
    plot = tmp_path / "told.svg"
    assert main(["eval", "told", *flags.split(), "--json", "--plot", str(plot)]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = document["rows"]
    expected = [("dense", None, 1)]
    expected += [("streaming-llm", memory, talk) for memory in (0, 2000) for talk in (1, 8)]
    assert [(row["method"], row["memory"], row["talk"]) for row in rows] == expected
    assert "dense C=40 has no room for all questions at talk 8" in caplog.text
    names = [*SIZES, "talk", "num_questions", "num_tokens", *ENDS, "seconds"]
    recall = {"recall_places", "recall_layers"}  # of a memory
    assert all({*row} == {*names} | (recall if row["memory"] else set()) for row in rows)
    assert "other talk, cache sizes" in plot.read_text()
    _, caption = told.EVALUATION.figure(document)
    assert "llama-mini" in caption
    one, plot = tmp_path / "one.json", tmp_path / "one.svg"
    settings = told.ToldSettings(plot=plot, out=one)
    make_document("eval told", settings, [row for row in rows if row["talk"] == 1], started=0.0)
    assert one.exists() and "other talk, cache sizes" in plot.read_text()
