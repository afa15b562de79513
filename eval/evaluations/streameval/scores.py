"""Stream of lines and queries of `kvalign eval streameval`, and the scoring of answers.

A number with its `>` is tokenised apart from the text around it, in lines and answers alike. So an
answer has the same tokens as its line, whatever a tokenizer would merge.
"""

import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvalign.eval.protocol import Row
from kvalign.eval.protocol.grid import sizes_of
from kvalign.eval.protocol.statistics import share_of
from kvalign.foundation.errors import UserError
from kvalign.methods.base import Method
from kvalign.models.input_ids import ids_of
from kvalign.streaming.scoring import OnLabels, check_losses


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
    """Consecutive pieces as tokens, the first after the tokenizer's opening tokens."""
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
