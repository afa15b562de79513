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
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from kvalign.eval.protocol import Column, Document, Drawing, Evaluation, Row, share_column
from kvalign.eval.protocol.document import measures
from kvalign.eval.protocol.settings import ComparisonSettings, seed_option
from kvalign.eval.protocol.statistics import share_of
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import MOST_ITEMS, option

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from kvalign.methods.base import Method
    from kvalign.models.loading import LoadedModel
    from kvalign.streaming.scoring import OnLabels


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
        A document whose rows have the sizes, `COLUMNS` (means over the queries: distance_tokens
        from the value's end to its answer, in_cache if its line is wholly seen by the step that
        begins the answer, answer_nll_nats of an answer), num_queries, seconds.

    Raises:
        UserError: a stream too long for a method that does not evict.
    """
    from kvalign.eval.protocol.grid import one_by_one

    texts = (
        pieces(settings.num_lines, settings.query_every, distance, settings.seed)
        for distance in dict.fromkeys(settings.distances)
    )
    streams = [encode(text, loaded.tokenizer, loaded.model.device) for text in texts]
    for method in methods:
        check_fits(method, streams)
    num_all = sum(one.piece.is_query for stream in streams for one in stream)
    for method, bar in one_by_one(methods, num_all, "queries"):
        for stream in streams:
            yield score(method, stream, bar.update)


@dataclass(frozen=True)
class Piece:
    """A line, counted from 1, that registers a number; or a query for it `distance` lines later."""

    line: int
    number: int
    distance: int | None = None

    @property
    def is_query(self) -> bool:
        return self.distance is not None

    @property
    def opening(self) -> str:
        if self.is_query:
            return f"What is the REGISTER_CONTENT of line {self.line}? <"
        return f"line {self.line}: REGISTER_CONTENT is <"

    @property
    def answer(self) -> str:
        return f"{self.number}>"

    @property
    def text(self) -> str:
        return f"{self.opening}{self.answer}\n"


@dataclass(frozen=True)
class EncodedPiece:
    """A piece as tokens [T] int64, and where it and its answer lie in the stream."""

    piece: Piece
    ids: Tensor
    start: int
    answer_start: int
    answer_end: int

    @property
    def answer(self) -> Tensor:
        return self.ids[self.answer_start - self.start : self.answer_end - self.start]


def pieces(num_lines: int, query_every: int, distance: int, seed: int) -> Iterator[Piece]:
    """Lines with random numbers of five digits, the same at every distance. After every
    `query_every` lines comes a query for the line `distance` lines before, once there is one.
    """
    draws = random.Random(seed)
    numbers: dict[int, int] = {}
    for line in range(1, num_lines + 1):
        numbers[line] = draws.randint(10_000, 99_999)
        yield Piece(line, numbers[line])
        past = line - distance
        if line % query_every == 0 and past in numbers:
            yield Piece(past, numbers[past], distance)


def encode(
    stream: Iterable[Piece], tokenizer: PreTrainedTokenizerBase, device: torch.device | str = "cpu"
) -> list[EncodedPiece]:
    """Consecutive pieces as tokens, the first after the tokenizer's opening tokens. A number with
    its `>` is tokenised apart from the text around it, in lines and answers alike. So an answer has
    the same tokens as its line, whatever a tokenizer would merge.
    """
    import torch

    from kvalign.models.input_ids import ids_of

    encoded: list[EncodedPiece] = []
    start = 0
    for piece in stream:
        opening = ids_of(piece.opening, tokenizer, prefix=not encoded, goes_on=bool(encoded))
        answer, newline = (
            ids_of(text, tokenizer, prefix=False, goes_on=True) for text in (piece.answer, "\n")
        )
        ids = torch.tensor([*opening, *answer, *newline], device=device)
        answer_end = start + len(ids) - len(newline)
        encoded.append(EncodedPiece(piece, ids, start, answer_end - len(answer), answer_end))
        start += len(ids)
    return encoded


def check_fits(method: Method, streams: Iterable[Sequence[EncodedPiece]]) -> None:
    """Raise UserError for a method without room for a whole stream."""
    method.reset()
    longest = max(stream[-1].start + len(stream[-1].ids) for stream in streams)
    if method.tokens_left is not None and longest > method.tokens_left:
        raise UserError(
            f"{method.name} has room for {method.tokens_left} tokens, the stream has {longest}: "
            "lower --num-lines or choose a streaming method"
        )


def score(
    method: Method, stream: Sequence[EncodedPiece], on_queries: OnLabels = lambda n: None
) -> Row:
    """Row of a method, for a stream whose queries all have one distance."""
    from kvalign.eval.protocol.grid import sizes_of
    from kvalign.streaming.scoring import check_losses

    start = time.perf_counter()
    right, nll = ask(method, stream, on_queries)
    seconds = time.perf_counter() - start
    check_losses(nll, method, most=math.inf)  # of whole answers
    lines = {one.piece.line: one for one in stream if not one.piece.is_query}
    queries = [(lines[one.piece.line], one) for one in stream if one.piece.is_query]
    return {
        **sizes_of(method),
        "distance_lines": queries[0][1].piece.distance,
        "distance_tokens": fmean(query.answer_start - line.answer_end for line, query in queries),
        "in_cache": fmean(sees(method, line, query.answer_start) for line, query in queries),
        "num_queries": len(queries),
        **share_of("accuracy", right.tolist()),
        "answer_nll_nats": nll.double().mean().item(),
        "seconds": seconds,
    }


def ask(
    method: Method, stream: Sequence[EncodedPiece], on_queries: OnLabels = lambda n: None
) -> tuple[Tensor, Tensor]:
    """Feed a stream; return for each of its Q queries whether the answer is right [Q] bool, and the
    NLL of the right answer in nats [Q] float32.
    """
    import torch

    method.reset()
    right, nll = [], []
    for one in stream:
        if not one.piece.is_query:
            method.feed(one.ids[None])
            continue
        # Step by step: what is fed at once attends to all of itself besides a full cache.
        last = one.answer_end - one.start - 1
        steps = [method.feed(ids.view(1, 1)) for ids in one.ids[:last]]
        method.feed(one.ids[None, last:])
        every = torch.cat(steps[-len(one.answer) :])  # [answer tokens, V]
        right.append((every.argmax(-1) == one.answer).all())
        nll.append(torch.nn.functional.cross_entropy(every, one.answer, reduction="sum"))
        on_queries(1)
    return torch.stack(right).cpu(), torch.stack(nll).cpu()


def sees(method: Method, line: EncodedPiece, num_fed: int) -> bool:
    """Return whether a whole line is among the entries that the step of the `num_fed`-th token
    attends to: the sinks and the latest that have not been evicted.
    """
    dropped = method.sizes.num_dropped(num_fed - 1)
    if not dropped or method.tokens_left is not None:
        return True
    num_sinks = method.sizes.num_sinks
    return line.start >= num_sinks + dropped or line.answer_end <= num_sinks


COLUMNS = {
    "distance_lines": Column("lines back", is_key=True),
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
        "An answer is right if greedy decoding gives it exactly. Its loss also distinguishes "
        "models that give no right answers. No method can answer about a line that is no longer in "
        "the cache."
    )
    in_summary = ("accuracy", "answer_nll_nats")
    columns = COLUMNS

    def figure(self, document: Document) -> Drawing | None:
        from kvalign.eval.drawing import draw, panels_by

        title, rows = self.title(document), document["rows"]
        distances = {row["distance_lines"] for row in rows}
        if len(distances) == 1 or not any(row["accuracy"] for row in rows):
            return None
        names = ("distance_lines", "answer_nll_nats")
        panels = panels_by("cache_size", rows, f"{title}, C = ", *names)
        figure = draw(panels, x="lines back", y="loss of the right answer, nats")
        return figure, f"Loss of the right answer against distance: {title}"


EVALUATION = StreamEval()
