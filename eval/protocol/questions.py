"""Questions about streams, asked in one way: `needle`, `told` and `streameval` say what is read and
what is asked where, `recall` scores its answers with the stream.

A question is asked on a copy of the stream, so questions do not affect each other, and a stream is
read once for all distances. Or it stays in the stream, with the right answer.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any, Generic, TypeVar

import torch

from kvalign.eval.protocol.data import Row
from kvalign.eval.protocol.grid import one_by_one, sizes_of, title_of
from kvalign.foundation.progress import Bar
from kvalign.foundation.statistics import share_of
from kvalign.methods.base import Method

log = logging.getLogger(__name__)

Q = TypeVar("Q")
Ask = Callable[[Method, Q], Mapping[str, float]]
"""Function that feeds a method a question and returns by measure how much of its answer is right, 0
to 1, or a bool; or other figures (`means`).
"""


@dataclass(frozen=True)
class Stop(Generic[Q]):
    """Place in a stream where questions are asked.

    Attributes:
        at: names and values that its row has, of the distance from what is asked for.
        pieces: tokens since the last stop, each piece fed at once.
        questions: asked one by one.
        ask: asks one.
        room: tokens of the longest question, with its answer.
        stays: questions and answers stay in the stream.
    """

    at: Row
    pieces: Sequence[Sequence[int]]
    questions: Sequence[Q]
    ask: Ask[Q]
    room: int
    stays: bool = False


Streams = Sequence[Sequence[Stop[Q]]]


@dataclass
class Tally:
    """Answers at stops of equal `at`, and the length of each stream by then."""

    at: Row
    num_stops: int = 0  # in all
    answers: dict[int, list[Mapping[str, float]]] = field(default_factory=dict)  # of each stream
    num_tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0


def ask_all(
    methods: Sequence[Method],
    streams_for: Callable[[int], Streams[Q]],
    units: str,
    means: Collection[str] = (),
) -> Iterator[Row]:
    """Rows of all methods; `streams_for` makes the streams for caches of a size."""
    num_each = sum(len(x) for one in methods[:1] for x in streams_for(one.sizes.cache_size))
    for method, bar in one_by_one(methods, num_each, units):
        yield from rows_of(method, streams_for(method.sizes.cache_size), bar, means)


def rows_of(
    method: Method, streams: Streams[Q], bar: Bar, means: Collection[str] = ()
) -> list[Row]:
    """Let a method read streams, and ask at each of their stops. `bar` counts stops.

    Returns:
        A row for each `at` whose questions fit into the context length, in order of occurrence:
        the sizes, `at`, num_questions, num_tokens (mean length of the stream before them), seconds,
        and of figures named in `means` the mean, of others the share and its interval.
    """
    tallies: dict[Any, Tally] = {}
    for stop in (stop for stops in streams for stop in stops):
        tallies.setdefault(tuple(stop.at.items()), Tally(stop.at)).num_stops += 1
    for index, stops in enumerate(streams):
        method.reset()
        num_read = 0
        for number, stop in enumerate(stops):
            began, tally = time.perf_counter(), tallies[tuple(stop.at.items())]
            num_new = sum(map(len, stop.pieces))
            if method.tokens_left is not None and method.tokens_left < num_new + stop.room:
                bar.skip(len(stops) - number)
                break
            for ids in filter(len, stop.pieces):
                method.feed(torch.tensor([[*ids]], device=method.model.device))
            num_read += num_new
            tally.num_tokens.append(num_read)
            answers = tally.answers.setdefault(index, [])
            if stop.stays:
                answers += [stop.ask(method, question) for question in stop.questions]
                num_read += stop.room
            else:
                answers += on_copies(method, stop.questions, stop.ask)
            tally.seconds += time.perf_counter() - began
            bar.update(1)
    rows = []
    for tally in tallies.values():
        if len(tally.num_tokens) == tally.num_stops:
            num_tokens = sum(tally.num_tokens) / tally.num_stops
            groups = [*tally.answers.values()]
            of_all = {x: [[one[x] for one in group] for group in groups] for x in groups[0][0]}
            num_questions = sum(map(len, groups))
            more = tally.at | {"num_questions": num_questions, "num_tokens": num_tokens}
            rows.append(row_of(method, of_all, tally.seconds, more, means))
        else:  # rows are of the same questions
            where = ", ".join(f"{name} {value}" for name, value in tally.at.items())
            log.warning("%s has no room for all questions at %s", title_of(method), where)
    return rows


def row_of(
    method: Method,
    answers: Mapping[str, Sequence[Sequence[float]]],
    seconds: float,
    more: Row,
    means: Collection[str] = (),
) -> Row:
    """Row of a method: its sizes, `more`, and by measure the share of right answers, or a mean;
    answers that share a stream, and so its text, are a group.
    """
    row = sizes_of(method) | more
    for name, groups in answers.items():
        row |= {name: fmean(chain(*groups))} if name in means else share_of(name, groups)
    return row | {"seconds": seconds}


def on_copies(method: Method, questions: Sequence[Q], ask: Ask[Q]) -> list[Mapping[str, float]]:
    """Answers to questions, each asked on a copy of the stream."""
    state, answers = method.state(), []
    for question in questions:
        method.restore(state)  # before the first, too: a state shows buffers that a step changes
        answers.append(ask(method, question))
    method.restore(state)
    return answers
