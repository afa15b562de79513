"""StreamEval: values registered in an endless text, each asked for some lines later.

    line 9: REGISTER_CONTENT is <48213>
    line 10: REGISTER_CONTENT is <70125>
    What is the REGISTER_CONTENT of line 8? <31744>
    line 11: REGISTER_CONTENT is <96581>

After StreamingLLM (Xiao et al. 2024, figures 8 and 9, table 7), whose authors published neither
texts nor code; the form is that of LongEval's line retrieval (Li et al. 2023).

An answer is the number and its `>`. It is scored by teacher forcing. All its tokens are the most
likely ones exactly if greedy decoding writes it, so `accuracy` is exact match. The text stays the
same for all methods, and the NLL of the answer grades models that never write it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvalign.eval.protocol import ComparisonSettings, Evaluation, seed_option
from kvalign.eval.protocol.data import Column, Document, Drawing, Row, share_column
from kvalign.eval.protocol.document import measures
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import MOST_ITEMS, option

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvalign.eval.protocol.questions import Stop
    from kvalign.methods.base import Method
    from kvalign.models.loading import LoadedModel


@dataclass(frozen=True, kw_only=True)
class StreamEvalSettings(ComparisonSettings):
    """Ask for values that were registered some lines back in an endless stream: how far back can a
    method, and the model itself, read?

    Example:
        kvalign eval streameval --num-lines 20 --distances 0,5
    """

    distances: tuple[int, ...] = option(
        (0, 5, 10, 20, 40),
        help="distances to ask for, in lines back, a row each, comma-separated; 0: the latest line",
        at_least=0,
    )
    num_lines: int = option(
        200, help="lines of the stream, a value each", at_least=1, at_most=MOST_ITEMS
    )
    query_every: int = option(10, help="lines from one query to the next", at_least=1)
    seed: int = seed_option("the values, the same for each method and distance")

    def __post_init__(self) -> None:
        super().__post_init__()
        last = self.num_lines - self.num_lines % self.query_every
        if last <= max(self.distances):
            raise UserError(
                f"--num-lines {self.num_lines} and --query-every {self.query_every} put the last "
                f"query after line {last}, which must exceed the largest of --distances "
                f"({max(self.distances)}): raise --num-lines"
            )


@measures(StreamEvalSettings)
def streameval(
    settings: StreamEvalSettings, loaded: LoadedModel, methods: list[Method]
) -> Iterable[Row]:
    """Let every method read one stream for each distance, and score its answers.

    Returns:
        A document whose rows have the sizes, `COLUMNS` (means over the queries; a line is in the
        cache if the step that begins the answer sees all of it) and what `rows_of` says.
    """
    from kvalign.eval.protocol.questions import ask_all

    texts = (
        pieces(settings.num_lines, settings.query_every, distance, settings.seed)
        for distance in dict.fromkeys(settings.distances)
    )
    streams = [stops(encode(text, loaded.tokenizer)) for text in texts]
    return ask_all(methods, lambda size: streams, "queries", MEANS)


class StreamLine(NamedTuple):
    """A line, counted from 1, that registers a number; or a query for it `distance` lines later."""

    line: int
    distance: int | None
    opening: str
    answer: str  # the number, and what closes it


@dataclass(frozen=True)
class EncodedPiece:
    """A piece as tokens, and where it and its answer lie in the stream."""

    piece: StreamLine
    ids: list[int]
    start: int
    answer_start: int
    answer_end: int

    @property
    def answer(self) -> list[int]:
        return self.ids[self.answer_start - self.start : self.answer_end - self.start]


Query = tuple[EncodedPiece, EncodedPiece]
"""A line, and the query for it."""


def pieces(num_lines: int, query_every: int, distance: int, seed: int) -> Iterator[StreamLine]:
    """Lines with random numbers of five digits, the same at every distance. After every
    `query_every` lines comes a query for the line `distance` lines before, once there is one.
    """
    draws, answers = random.Random(seed), dict[int, str]()
    for line in range(1, num_lines + 1):
        answers[line] = f"{draws.randint(10_000, 99_999)}>"
        yield StreamLine(line, None, f"line {line}: REGISTER_CONTENT is <", answers[line])
        past = line - distance
        if line % query_every == 0 and past in answers:
            question = f"What is the REGISTER_CONTENT of line {past}? <"
            yield StreamLine(past, distance, question, answers[past])


def encode(stream: Iterable[StreamLine], tokenizer: PreTrainedTokenizerBase) -> list[EncodedPiece]:
    """Consecutive pieces as tokens, the first after the tokenizer's opening tokens. A number with
    its `>` is tokenised apart from the text around it, in lines and answers alike. So an answer has
    the same tokens as its line, whatever a tokenizer would merge.
    """
    from kvalign.models.input_ids import ids_of

    encoded, start = list[EncodedPiece](), 0
    for piece in stream:
        opening = ids_of(piece.opening, tokenizer, prefix=not encoded, goes_on=bool(encoded))
        answer = ids_of(piece.answer, tokenizer, prefix=False, goes_on=True)
        newline = ids_of("\n", tokenizer, prefix=False, goes_on=True)
        ids = [*opening, *answer, *newline]
        answer_end = start + len(ids) - len(newline)
        encoded.append(EncodedPiece(piece, ids, start, answer_end - len(answer), answer_end))
        start += len(ids)
    return encoded


def stops(stream: Sequence[EncodedPiece]) -> list[Stop[Query]]:
    """The queries of a stream, each after the lines since the last one."""
    from kvalign.eval.protocol.questions import Stop

    lines, new, stops = dict[int, EncodedPiece](), list[list[int]](), list[Stop[Query]]()
    for one in stream:
        if one.piece.distance is None:
            lines[one.piece.line] = one
            new.append(one.ids)
        else:
            at, query = {"distance_lines": one.piece.distance}, (lines[one.piece.line], one)
            stops.append(Stop(at, new, [query], ask, len(one.ids), stays=True))
            new = []
    return stops


def ask(method: Method, asked: Query) -> dict[str, float]:
    """Feed a query: whether its answer is right, the NLL of the right answer in nats, and where its
    line is.
    """
    import torch

    from kvalign.streaming.scoring import check_losses

    line, query = asked
    ids = torch.tensor(query.ids, device=method.model.device)
    answer = ids.new_tensor(query.answer)
    # Step by step: what is fed at once attends to all of itself besides a full cache.
    last = query.answer_end - query.start - 1
    steps = [method.feed(token.view(1, 1)) for token in ids[:last]]
    method.feed(ids[None, last:])
    every = torch.cat(steps[-len(answer) :])  # [answer tokens, V]
    nll = torch.nn.functional.cross_entropy(every, answer, reduction="sum")
    check_losses(nll[None], method, most=math.inf)  # of a whole answer
    return {
        "distance_tokens": query.answer_start - line.answer_end,
        "in_cache": sees(method, line, query.answer_start),
        "accuracy": bool((every.argmax(-1) == answer).all()),
        "answer_nll_nats": nll.item(),
    }


def sees(method: Method, line: EncodedPiece, num_fed: int) -> bool:
    """Return whether a whole line is among the entries that the step of the `num_fed`-th token
    attends to: the sinks and the latest that have not been evicted.
    """
    dropped = method.sizes.num_dropped(num_fed - 1)
    if not dropped or method.tokens_left is not None:
        return True
    num_sinks = method.sizes.num_sinks
    return line.start >= num_sinks + dropped or line.answer_end <= num_sinks


MEANS = ("distance_tokens", "in_cache", "answer_nll_nats")
COLUMNS = {
    "distance_lines": Column("lines back"),
    "accuracy": share_column("accuracy", "accuracy", "share of queries answered exactly"),
    # No merit as long as no answer is right: it is low for what guesses digits well.
    "answer_nll_nats": Column("answer NLL, nats", 3, about="loss of the right answer"),
    "in_cache": Column("in cache", 2, about="share of queries whose line is still in the cache"),
    "distance_tokens": Column("tokens back", 1, about="from the value to its answer"),
}


class StreamEval(Evaluation):
    settings = StreamEvalSettings
    run = staticmethod(streameval)
    heading = "StreamEval"
    about = (
        "Lines register numbers, and every few lines a query asks for the number some lines back. "
        "An answer is right if greedy decoding gives it exactly. Its loss also tells models apart "
        "that give no right answers. No method knows a line that is no longer in the cache."
    )
    over = "distance_lines"
    columns = COLUMNS

    def figure(self, document: Document) -> Drawing | None:
        from kvalign.eval.drawing import draw, panels_by

        title, rows = self.title(document), document["rows"]
        if not any(row["accuracy"] for row in rows):
            return None
        names = ("distance_lines", "answer_nll_nats")
        panels = panels_by("cache_size", rows, f"{title}, C = ", *names)
        figure = draw(panels, x="lines back", y="loss of the right answer, nats")
        return figure, f"Loss of the right answer against distance: {title}"


EVALUATION = StreamEval()
