"""Streams of `kvalign eval needle`, and its answers against a reader that can do the task."""

import re
from collections import Counter
from itertools import pairwise
from random import Random

import pytest
import torch
from helpers.reader import Reader

import kvalign.eval
from kvalign import load_model
from kvalign.data_gen.corpus import OWNERS
from kvalign.eval.evaluations import needle
from kvalign.eval.evaluations.needle import KINDS, NeedleSettings, asker, haystacks
from kvalign.eval.protocol.questions import on_copies, rows_of
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.methods import make_method

MODEL = "llama-mini"
SMALL = dict(cache_sizes=(40,), distances=(0, 2, 5), num_needles=3, num_streams=2, gap=20)


@pytest.fixture(scope="module")
def streams(loaded):
    return haystacks(NeedleSettings(**SMALL), loaded)["single"]


class AnswerReader(Reader):
    """Writes the answers, at most so many, of a question among those of streams, as far as it still
    has them.
    """

    def __init__(self, loaded, memory_len, streams, most=10):
        super().__init__(loaded, memory_len)
        self.most, self.todo = most, []
        self.needles = {tuple(one.question): one for stream in streams for one in stream.needles}

    def feed(self, ids):
        if asked := self.needles.get(tuple(ids[0].tolist())):
            text = self.tokenizer.decode(self.memory)
            known = [x for x in asked.answers[: self.most] if self.tokenizer.decode(x) in text]
            self.todo = [token for answer in known for token in answer]
        return super().feed(ids)

    def answer(self, text, logits):
        if self.todo:
            logits[self.todo.pop(0)] = 1


def search(method, streams, distances):
    with progress.shown_as("needle") as bar:
        stops = [stream.stops(distances, 40, asker(method), {}) for stream in streams]
        return rows_of(method, stops, bar)


def test_codes_are_in_the_text(loaded, streams):
    decode = loaded.tokenizer.decode
    for stream in streams:
        names = set()
        for one in stream.needles:
            question, code = decode(one.question), decode(one.answers[0])
            (name,) = re.findall(r"^\n The secret code of the (.*) is$", question)
            assert re.fullmatch(r" \d{5}", code) and name in OWNERS
            names.add(name)
            said = f"{question}{code} . Remember : the secret code of the {name} is{code} . \n"
            assert decode(stream.ids[: one.end]).endswith(said)
        assert len(names) == 3
        # As long as the last one is asked for, at most.
        assert len(stream.ids) == stream.needles[-1].end + 5 * 40
    assert len({tuple(stream.ids) for stream in streams}) == 2
    settings = NeedleSettings(**SMALL | dict(cache_sizes=(40, 8), kinds=("multi-key", "single")))
    assert haystacks(settings, loaded)["single"] == streams, "the same for each size, beside others"


@pytest.mark.parametrize(("memory_len", "right"), [(10_000, [1, 1, 1]), (170, [1, 1, 0])])
def test_a_reader_finds_what_it_has(memory_len, right, loaded, streams):
    method = AnswerReader(loaded, memory_len, streams)
    rows = search(method, streams, [0, 2, 5])
    assert [row["accuracy"] for row in rows] == right
    for row, distance in zip(rows, (0, 2, 5), strict=True):
        assert row["distance"] == distance and row["num_questions"] == 6
        assert row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"] + 1e-9
    # Each token of a stream is read once.
    lengths = sum(len(stream.ids) for stream in streams)
    questions = sum(len(one.question) for stream in streams for one in stream.needles)
    assert lengths + 3 * questions <= method.num_fed <= lengths + 3 * questions + 18 * 5


@pytest.mark.parametrize(
    ("name", "more"),
    [("streaming-llm", {}), ("streaming-llm", dict(memory=500, num_recalled=8)), ("dense", {})],
)
def test_a_question_leaves_the_stream_as_it_is(name, more, loaded, streams):
    undisturbed, asked = (make_method(name, loaded.model, cache_size=40, **more) for _ in "ab")
    (*_, last) = streams[0].needles
    read = torch.tensor([streams[0].ids[: last.end]])
    for method in (undisturbed, asked):
        method.feed(read)
    on_copies(asked, [last], asker(loaded))
    ids = torch.tensor([streams[0].ids[last.end :]])
    assert torch.allclose(asked.feed(ids), undisturbed.feed(ids), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_hidden_and_asked_for(kind):
    num_names, hide = KINDS[kind]
    hidden = hide(OWNERS[:num_names], Random(5))
    times, text = Counter(hidden.passage), "".join(hidden.passage)
    assert all(answer in times for answer in hidden.answers)
    if "words" in kind:
        ranked = [word for word, _ in times.most_common()]
        num = len(hidden.answers)
        assert {*ranked[:num]} == {*hidden.answers}
        assert times[ranked[num - 1]] > times[ranked[num]]  # no other word is as frequent
    elif kind == "variable-tracking":
        value, chain = hidden.passage[3], hidden.answers
        links = [f"VAR{new} = VAR{old} ." for old, new in pairwise(chain)]
        assert len(chain) == 5 and all(link in text for link in links)
        assert f"VAR{chain[0]} ={value} ." in text and value in hidden.question
    else:
        names = [name for name in OWNERS if f"the {name}" in hidden.question]
        told = re.findall(r"codes? of the (\w+ \w+) is( \d{5}) \.", text)
        assert len({*told}) == {"single": 1}.get(kind, 4)
        assert {code for name, code in told if name in names} == {*hidden.answers}
    assert not [x for x in needle.WORDS.split() for y in needle.WORDS.split() if x in y and x != y]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "single"])
def test_the_score_is_the_share_of_answers(kind, loaded):
    settings = NeedleSettings(cache_sizes=(40,), distances=(0, 5), kinds=(kind,), num_streams=1)
    streams = haystacks(settings, loaded)[kind]
    num = len(streams[0].needles[0].answers)
    for most in (0, 1, 3):
        rows = search(AnswerReader(loaded, 10_000, streams, most), streams, [0, 5])
        assert [row["accuracy"] for row in rows] == pytest.approx([min(most, num) / num] * 2)
    rows = search(AnswerReader(loaded, 30, streams), streams, [5])
    assert rows[0]["accuracy"] == 0 and 0.6 < rows[0]["accuracy_high"] < 1


def test_rows_tables_and_panels_are_of_kinds(loaded):
    small = dict(cache_sizes=16, distances=(0, 1), num_streams=1, gap=5, methods="streaming-llm")
    document = kvalign.eval.needle(**small, kinds=("multi-key", "frequent-words"), loaded=loaded)
    kinds = ["multi-key"] * 2 + ["frequent-words"] * 2
    assert [row["kind"] for row in document["rows"]] == kinds
    (table,) = needle.EVALUATION.tables(document)
    assert [row[1].text for row in table.rows] == kinds
    figure, *_ = needle.EVALUATION.figure(document)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [f"llama-mini, C = 16, {kind}" for kind in dict.fromkeys(kinds)]
    assert "kind" not in kvalign.eval.needle(**small, loaded=loaded)["rows"][0]
    with pytest.raises(UserError, match="cannot write words"):
        kvalign.eval.needle(**small, loaded=load_model("recall-llama"))
