"""The generator's text, and the scorer against a reader that can do the task and real greedy
decoding.
"""

import math
import re
from dataclasses import replace
from itertools import islice

import pytest
import torch
from helpers.reader import Reader
from helpers.tiny_models import tiny_model

from kvalign.cache.sizes import CacheSizes
from kvalign.eval.evaluations.streameval import MEANS, ask, encode, pieces, sees, stops
from kvalign.eval.protocol.questions import rows_of
from kvalign.foundation import progress
from kvalign.methods import make_method
from kvalign.streaming.loop import stream_tokens


def as_text(*args):
    return "".join(f"{piece.opening}{piece.answer}\n" for piece in pieces(*args))


def queries(stream):
    return [one for one in stream if one.piece.distance is not None]


class Oracle(Reader):
    """Copies an answer from the line that it finds in its text."""

    def answer(self, text, logits):
        asked = re.search(r"What is the REGISTER_CONTENT of line (\d+)\? <(\d*)$", text)
        line = asked and re.search(rf"line {asked[1]}: REGISTER_CONTENT is <(\d+>)\n", text)
        logits[self.ids_of(line[1])[len(self.ids_of(asked[2]))] if line else 0] = 100


@pytest.mark.parametrize("distance", [0, 3, 20, 41])
def test_queries_ask_for_what_was_registered_that_many_lines_before(distance):
    registered, num_queries = [], 0
    for text in as_text(60, 7, distance, 3).splitlines():
        if line := re.fullmatch(r"line (\d+): REGISTER_CONTENT is <(\d{5})>", text):
            registered.append(line[2])
            assert int(line[1]) == len(registered)
        else:
            assert len(registered) % 7 == 0
            asked = re.fullmatch(r"What is the REGISTER_CONTENT of line (\d+)\? <(\d{5})>", text)
            assert int(asked[1]) == len(registered) - distance
            assert asked[2] == registered[-1 - distance]
            num_queries += 1
    assert num_queries == sum(line > distance for line in range(7, 61, 7)) > 0
    assert registered == [line[2] for line in re.finditer(r"(is) <(\d+)", as_text(60, 7, 0, 3))]


def test_tokens_are_the_text_and_answers_those_of_their_line(loaded):
    stream = encode(pieces(30, 10, 12, 0), loaded.tokenizer)
    ids = [token for one in stream for token in one.ids]
    assert loaded.tokenizer.decode(ids) == as_text(30, 10, 12, 0)
    lines = {one.piece.line: one for one in stream if one.piece.distance is None}
    for query in queries(stream):
        assert query.answer == lines[query.piece.line].answer
        assert query.answer == ids[query.answer_start : query.answer_end]
        assert loaded.tokenizer.decode(query.answer) == query.piece.answer


def test_a_reader_that_can_do_it_is_right_as_far_as_it_remembers(loaded):
    oracle = Oracle(loaded, 200)
    oracle.sizes = CacheSizes(199, 0, 1)
    streams = [encode(pieces(60, 10, d, 0), loaded.tokenizer) for d in (0, 5, 10, 20)]
    with progress.shown_as("streameval") as bar:
        rows = rows_of(oracle, [stops(stream) for stream in streams], bar, MEANS)
    assert [row["num_questions"] for row in rows] == [6, 6, 5, 4]
    assert [row["accuracy"] for row in rows] == [1, 1, 0, 0]
    assert [row["in_cache"] for row in rows] == [1, 1, 0, 0]
    assert [row["answer_nll_nats"] < 1e-6 for row in rows] == [True, True, False, False]
    # All the mass is on a wrong token: 100 nats for each of the answer's.
    lens = [len(query.answer) for query in queries(streams[2])]
    assert math.isclose(rows[2]["answer_nll_nats"], 100 * sum(lens) / len(lens), rel_tol=1e-6)


@pytest.mark.slow
def test_teacher_forcing_is_greedy_decoding(loaded):
    """The right answers are replaced by what greedy decoding writes: as it is, with the last token
    wrong, with the first one wrong, and not at all.
    """
    model = tiny_model("gpt2", vocab_size=len(loaded.tokenizer), n_positions=100)
    method = make_method("streaming-llm", model, cache_size=48)
    stream = encode(pieces(8, 2, 1, 0), loaded.tokenizer)
    expected = []
    for i, one in enumerate(stream):
        if one.piece.distance is None:
            continue
        method.reset()
        for before in stream[:i]:
            feed_as_scored(method, before)
        opening = torch.tensor(one.ids[: one.answer_start - one.start])
        for token in opening[:-1]:
            method.feed(token.view(1, 1))
        greedy = stream_tokens(method, opening[-1:][None], before=opening[:-1][None])
        answer = written = torch.cat(list(islice(greedy, len(one.answer)))).tolist()
        change = len(expected)
        if change in (1, 2):
            wrong = len(answer) - 1 if change == 1 else 0
            answer = [token + (place == wrong) for place, token in enumerate(answer)]
        if change < 3:
            begin, end = one.answer_start - one.start, one.answer_end - one.start
            stream[i] = one = replace(one, ids=[*one.ids[:begin], *answer, *one.ids[end:]])
        expected.append(written == one.answer)
    assert expected == [True, False, False, False]
    method.reset()
    found = []
    for stop in stops(stream):
        for ids in stop.pieces:
            method.feed(torch.tensor([ids]))
        found += [ask(method, query) for query in stop.questions]
    assert [one["accuracy"] for one in found] == expected
    method.reset()
    plain = [float(nll) for one in stream if (nll := feed_as_scored(method, one)) is not None]
    assert [one["answer_nll_nats"] for one in found] == pytest.approx(plain, rel=1e-5)


def feed_as_scored(method, one):
    """Feed lines whole and queries token by token; the NLL of an answer, by its definition."""
    ids = torch.tensor(one.ids)
    if one.piece.distance is None:
        method.feed(ids[None])
        return None
    nll = 0
    for i, token in enumerate(ids[:-2]):
        logits = method.feed(token.view(1, 1))
        if i + 1 >= one.answer_start - one.start:
            nll = nll - logits[0].log_softmax(-1)[ids[i + 1]]
    method.feed(ids[-2:][None])
    return nll


@pytest.mark.slow
def test_queries_see_no_more_than_the_cache_and_in_cache_says_what(loaded):
    """Against what the methods really hold when an answer begins."""
    stream = encode(pieces(6, 3, 0, 0), loaded.tokenizer)
    query = queries(stream)[-1]
    places = range(query.answer_start)
    tokens = [replace(query, start=i, answer_start=i + 1, answer_end=i + 1) for i in places]
    cells = [("window", 1), ("streaming-llm", 1), ("streaming-llm", 7), ("streaming-llm", 46)]
    for name, num_evicted in [*cells, ("recompute", 1), ("recompute", 9), ("dense", 1)]:
        max_len = 512 if name == "dense" else 51
        model = tiny_model("gpt2", vocab_size=len(loaded.tokenizer), n_positions=max_len + 24)
        method = make_method(name, model, cache_size=50, num_evicted=num_evicted)
        seen = seen_at(method, stream, query)
        assert 0 < len(seen) <= max_len
        found = {one.start for one in tokens if sees(method, one, query.answer_start)}
        assert found == seen, (name, num_evicted)


def seen_at(method, stream, query):
    """Indices of the tokens that the step before an answer attends to."""
    end = query.answer_start
    *before, last = torch.tensor([[x for one in stream for x in one.ids][:end]]).split(1, 1)
    for token in before:
        method.feed(token)
    held = method.cache.index().tolist() if method.name in ("window", "streaming-llm") else []
    method.feed(last)
    if method.name == "recompute":
        return {*range(end - len(method.rows[0]), end)}
    return {*range(end)} if method.name == "dense" else {*held, end - 1}
