"""The stream of lines and queries of `kvalign eval streameval`, and how answers are scored.

A number with its `>` is tokenised apart from what is before and after, in lines and answers alike.
So an answer has the very tokens of the line it asks for, whatever a tokenizer would merge.
"""

import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvalign.eval.protocol.evaluation import Row
from kvalign.eval.protocol.grid import sizes_of
from kvalign.foundation.errors import UserError
from kvalign.methods.base import Method
from kvalign.models.prefix_tokens import prefix_ids
from kvalign.streaming.health import check_losses
from kvalign.streaming.scoring import OnLabels


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
    """A piece as tokens [T] int64, and the index in the stream of its first."""

    piece: Piece
    start: int
    opening: Tensor
    answer: Tensor
    newline: Tensor

    @property
    def ids(self) -> Tensor:
        return torch.cat([self.opening, self.answer, self.newline])

    @property
    def answer_start(self) -> int:
        return self.start + len(self.opening)

    @property
    def answer_end(self) -> int:
        return self.answer_start + len(self.answer)


def pieces(num_lines: int, query_every: int, distance: int, seed: int) -> Iterator[Piece]:
    """Lines with random numbers of five digits, the same at every distance; after each
    `query_every` of them a query for the number registered `distance` lines before the latest,
    once there is one.
    """
    draws = random.Random(seed)
    numbers: dict[int, int] = {}
    for line in range(1, num_lines + 1):
        numbers[line] = draws.randint(10_000, 99_999)
        yield Piece(line, numbers[line])
        asked = line - distance
        if line % query_every == 0 and asked in numbers:
            yield Piece(asked, numbers[asked], distance)


def encode(
    stream: Iterable[Piece], tokenizer: PreTrainedTokenizerBase, device: torch.device | str = "cpu"
) -> list[EncodedPiece]:
    """Tokens of pieces that follow each other; the first begins with what the tokenizer puts before
    a text.
    """
    encoded, start, before = [], 0, prefix_ids(tokenizer)
    for piece in stream:
        texts = [piece.opening, piece.answer, "\n"]
        opening, *rest = tokenizer(texts, add_special_tokens=False)["input_ids"]
        parts, before = [[*before, *opening], *rest], []
        tensors = [torch.tensor(ids, dtype=torch.int64, device=device) for ids in parts]
        encoded.append(EncodedPiece(piece, start, *tensors))
        start += sum(map(len, parts))
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
    """The row of a method, for a stream whose queries are all of one distance."""
    start = time.perf_counter()
    right, nll = ask(method, stream, on_queries)
    seconds = time.perf_counter() - start
    check_losses(nll, method, most=math.inf)  # of whole answers
    lines = {one.piece.line: one for one in stream if not one.piece.is_query}
    asked = [(lines[one.piece.line], one) for one in stream if one.piece.is_query]
    num_between = [query.answer_start - line.answer_end for line, query in asked]
    num_seen = sum(sees(method, line, query.answer_start) for line, query in asked)
    return {
        **sizes_of(method),
        "distance_lines": asked[0][1].piece.distance,
        "distance_tokens": sum(num_between) / len(asked),
        "in_cache": num_seen / len(asked),
        "num_queries": len(asked),
        "accuracy": right.double().mean().item(),
        "answer_nll_nats": nll.double().mean().item(),
        "seconds": seconds,
    }


def ask(
    method: Method, stream: Sequence[EncodedPiece], on_queries: OnLabels = lambda n: None
) -> tuple[Tensor, Tensor]:
    """Feed a stream; of each of its Q queries, whether the answer is right [Q] bool, and the NLL of
    the right answer in nats [Q] float32.
    """
    method.reset()
    right, nll = [], []
    for one in stream:
        if not one.piece.is_query:
            method.feed(one.ids[None])
            continue
        # Step by step: what is fed at once attends to all of itself besides a full cache.
        steps = [method.feed(x.view(1, 1)) for x in torch.cat([one.opening, one.answer[:-1]])]
        method.feed(torch.cat([one.answer[-1:], one.newline])[None])
        every = torch.cat(steps[len(one.opening) - 1 :])  # [answer tokens, V]
        right.append((every.argmax(-1) == one.answer).all())
        nll.append(torch.nn.functional.cross_entropy(every, one.answer, reduction="sum"))
        on_queries(1)
    return torch.stack(right).cpu(), torch.stack(nll).cpu()


def sees(method: Method, line: EncodedPiece, num_fed: int) -> bool:
    """Whether a line is wholly among what the step of the `num_fed`-th token attends to: the sinks
    and the latest, cache_size + 1 at most, less up to num_evicted - 1 that went with the others.
    """
    dropped = method.sizes.num_dropped(num_fed - 1)
    if not dropped or method.tokens_left is not None:
        return True
    num_sinks = method.sizes.num_sinks
    return line.start >= num_sinks + dropped or line.answer_end <= num_sinks


def num_queries(stream: Sequence[EncodedPiece]) -> int:
    return sum(one.piece.is_query for one in stream)
