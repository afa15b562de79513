"""Questions about a stream some distance later (`needle`, `told`), each on a copy of it. So
questions do not affect each other, and a stream is read once for all distances.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from kvalign.eval.protocol import Row
from kvalign.eval.protocol.grid import sizes_of, title_of
from kvalign.eval.protocol.statistics import share_of
from kvalign.foundation.progress import Bar
from kvalign.methods.base import Method

log = logging.getLogger(__name__)

Q = TypeVar("Q")
Ask = Callable[[Method, Q], Mapping[str, float]]
"""Function that feeds a method a question and returns by measure how much of its answer is right:
0 to 1, or a bool.
"""


@dataclass(frozen=True)
class Stop(Generic[Q]):
    """Place in a stream where questions are asked.

    Attributes:
        distance: from their subject, in cache sizes.
        ids: tokens since the last stop.
        questions: asked one by one.
        room: tokens of the longest question, with its answer.
    """

    distance: int
    ids: list[int]
    questions: Sequence[Q]
    room: int


@dataclass
class Tally:
    """Answers at one distance, and the length of each stream by then."""

    answers: list[Mapping[str, float]] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def row(self) -> Row:
        mean = sum(self.num_tokens) / len(self.num_tokens)
        row: Row = {"num_questions": len(self.answers), "num_tokens": mean}
        for name in self.answers[0]:
            row |= share_of(name, [answer[name] for answer in self.answers])
        return row | {"seconds": self.seconds}


def rows_of(
    method: Method, streams: Sequence[Sequence[Stop[Q]]], ask: Ask[Q], by: str, bar: Bar
) -> list[Row]:
    """Let a method read streams, and ask at each of their stops. The result is a row for each
    distance, under the name `by`, whose questions fit. `bar` counts stops.
    """
    tallies = {stop.distance: Tally() for stops in streams for stop in stops}
    for stops in streams:
        method.reset()
        num_read = 0
        for number, stop in enumerate(stops):
            began, tally = time.perf_counter(), tallies[stop.distance]
            if method.tokens_left is not None and method.tokens_left < len(stop.ids) + stop.room:
                bar.skip(len(stops) - number)
                break
            if stop.ids:
                method.feed(torch.tensor([stop.ids], device=method.model.device))
            num_read += len(stop.ids)
            tally.answers += on_copies(method, stop.questions, ask)
            tally.num_tokens.append(num_read)
            tally.seconds += time.perf_counter() - began
            bar.update(1)
    rows = []
    for distance, tally in sorted(tallies.items()):
        # Rows are of the same questions: one that lacks some is left out.
        num_stops = sum(stop.distance == distance for stops in streams for stop in stops)
        if len(tally.num_tokens) == num_stops:
            rows.append(sizes_of(method) | {by: distance} | tally.row())
        else:
            log.warning("%s has no room for all questions at %d C", title_of(method), distance)
    return rows


def on_copies(method: Method, questions: Sequence[Q], ask: Ask[Q]) -> list[Mapping[str, float]]:
    """Answers to questions, each asked on a copy of the stream."""
    state, answers = method.state(), []
    for question in questions:
        method.restore(state)  # before the first, too: a state shows buffers that a step changes
        answers.append(ask(method, question))
    method.restore(state)
    return answers
