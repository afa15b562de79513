"""Streams of `kvalign eval needle`, and its answers against a reader that can do the task."""

import re

import pytest
import torch
from helpers.reader import Reader

from kvalign import load_model
from kvalign.eval.evaluations.needle import NAMES, NeedleSettings
from kvalign.eval.evaluations.needle.haystack import asker, haystacks
from kvalign.eval.protocol.questions import on_copies, rows_of
from kvalign.foundation import progress
from kvalign.methods import make_method

SMALL = dict(cache_sizes=(40,), distances=(0, 2, 5), num_needles=3, num_streams=2, gap=20)


@pytest.fixture(scope="module")
def loaded():
    return load_model("llama-mini")


@pytest.fixture(scope="module")
def streams(loaded):
    return haystacks(NeedleSettings(**SMALL), loaded)["single"]


class CodeReader(Reader):
    """Writes the code that it is asked for."""

    def answer(self, text, logits):
        asked = re.search(r"\n The secret code of the (\w+ \w+) is([ \d]*)$", text)
        told = asked and re.search(rf"code of the {asked[1]} is (\d{{5}}) \.", text)
        if told:
            code, begun = self.ids_of(f" {told[1]}"), self.ids_of(asked[2])
            if len(begun) < len(code):
                logits[code[len(begun)]] = 1


def search(method, streams, distances, kind="single"):
    with progress.shown_as("needle") as bar:
        stops = [stream.stops(distances, 40) for stream in streams]
        return rows_of(method, stops, asker(kind, method), "distance", bar)


def test_codes_are_in_the_text(loaded, streams):
    decode = loaded.tokenizer.decode
    for stream in streams:
        names = set()
        for needle in stream.needles:
            question, code = decode(needle.question), decode(needle.answers[0])
            (name,) = re.findall(r"^\n The secret code of the (.*) is$", question)
            assert re.fullmatch(r" \d{5}", code) and name in NAMES
            names.add(name)
            said = f"{question}{code} . Remember : the secret code of the {name} is{code} . \n"
            assert decode(stream.ids[: needle.end]).endswith(said)
        assert len(names) == 3
        # As long as the last one is asked for, at most.
        assert len(stream.ids) == stream.needles[-1].end + 5 * 40
    assert len({tuple(stream.ids) for stream in streams}) == 2
    settings = NeedleSettings(**SMALL | dict(cache_sizes=(40, 8), kinds=("multi-key", "single")))
    assert haystacks(settings, loaded)["single"] == streams, "the same for each size, beside others"


@pytest.mark.parametrize(("memory_len", "right"), [(10_000, [1, 1, 1]), (170, [1, 1, 0])])
def test_a_reader_finds_what_it_has(memory_len, right, loaded, streams):
    method = CodeReader(loaded, memory_len)
    rows = search(method, streams, [0, 2, 5])
    assert [row["accuracy"] for row in rows] == right
    for row, distance in zip(rows, (0, 2, 5), strict=True):
        assert row["distance"] == distance and row["num_questions"] == 6
        assert row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"] + 1e-9
    # Each token of a stream is read once.
    lengths = sum(len(stream.ids) for stream in streams)
    questions = sum(len(needle.question) for stream in streams for needle in stream.needles)
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
    on_copies(asked, [last], asker("single", loaded))
    ids = torch.tensor([streams[0].ids[last.end :]])
    assert torch.allclose(asked.feed(ids), undisturbed.feed(ids), atol=1e-4)
