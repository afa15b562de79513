"""StreamEval: values registered in an endless text, each asked for some lines later.

    line 9: REGISTER_CONTENT is <48213>
    line 10: REGISTER_CONTENT is <70125>
    What is the REGISTER_CONTENT of line 8? <31744>
    line 11: REGISTER_CONTENT is <96581>

After StreamingLLM (Xiao et al. 2024, figures 8 and 9, table 7), whose authors released neither
texts nor code; the form is that of LongEval's line retrieval (Li et al. 2023).

An answer is the number and its `>`. It is scored by teacher forcing: each of its tokens is compared
with the most likely one given the right tokens before it. All are right if and only if greedy
decoding writes the answer, so `accuracy` is exact match; the text stays the same for all methods;
and the NLL of the answer grades models that never write it.

A number with its `>` is tokenised apart from what is before and after, in lines and answers alike.
So an answer has the very tokens of the line it asks for, whatever a tokenizer would merge.
"""

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from kvalign.errors import UserError
from kvalign.eval.document import document
from kvalign.eval.grid import check_names, make_grid, sizes_of
from kvalign.eval.settings import StreamEvalSettings
from kvalign.methods.base import Method
from kvalign.models import load_model
from kvalign.scoring import OnLabels


@dataclass(frozen=True)
class Piece:
    """A line that registers a number, or a query for it.

    Attributes:
        line: the line that registers the number, counted from 1.
        distance: lines from that one to the latest when it is asked for; None: no query.
    """

    line: int
    number: int
    distance: int | None = None

    @property
    def opening(self) -> str:
        if self.distance is None:
            return f"line {self.line}: REGISTER_CONTENT is <"
        return f"What is the REGISTER_CONTENT of line {self.line}? <"

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


def evaluate(settings: StreamEvalSettings) -> dict[str, Any]:
    """Let every method read one stream a distance, and score its answers.

    Returns:
        A document whose rows have method, aligner, cache_size, num_sinks, num_evicted,
        distance_lines, distance_tokens (mean, from the value's end to its answer), in_cache (share
        of queries whose line is wholly seen by the step that begins the answer), num_queries,
        accuracy (share of answers that are right), answer_nll_nats (mean of an answer), seconds.

    Raises:
        UserError: wrong settings, or a stream too long for a method that does
            not evict; before any work.
    """
    started = time.perf_counter()
    check_names(settings)
    loaded = load_model(settings.model, settings.device, settings.dtype)
    methods = make_grid(settings, loaded.model)
    streams = {
        distance: encode(
            pieces(settings.num_lines, settings.query_every, distance, settings.seed),
            loaded.tokenizer,
            loaded.model.device,
        )
        for distance in settings.distances
    }
    for method in methods:
        check_room(method, streams.values())
    num_queries = sum(_num_queries(stream) for stream in streams.values())
    rows = []
    with tqdm(total=len(methods) * num_queries, unit="query") as bar:
        for method in methods:
            for distance, stream in streams.items():
                bar.set_description(
                    f"{method.title} C={method.sizes.cache_size} distance={distance}"
                )
                rows.append(score(method, stream, bar.update))
    return document("eval streameval", settings, rows, started=started)


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
    """Tokens of pieces that follow each other, without special tokens."""

    def ids(text: str) -> Tensor:
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor(found, dtype=torch.int64, device=device)

    encoded, start = [], 0
    for piece in stream:
        parts = [ids(text) for text in (piece.opening, piece.answer, "\n")]
        encoded.append(EncodedPiece(piece, start, *parts))
        start += sum(map(len, parts))
    return encoded


def check_room(method: Method, streams: Iterable[Sequence[EncodedPiece]]) -> None:
    """Raise UserError for a method that cannot take in a whole stream."""
    method.reset()
    longest = max(stream[-1].start + len(stream[-1].ids) for stream in streams)
    if method.tokens_left is not None and longest > method.tokens_left:
        raise UserError(
            f"{method.name} has room for {method.tokens_left} tokens, the stream has {longest}: "
            "lower --num-lines or choose a streaming method"
        )


def score(
    method: Method, stream: Sequence[EncodedPiece], on_queries: OnLabels = lambda n: None
) -> dict[str, Any]:
    """A row of `evaluate`, for a stream whose queries are all of one distance."""
    start = time.perf_counter()
    right, nll = ask(method, stream, on_queries)
    seconds = time.perf_counter() - start
    lines = {one.piece.line: one for one in stream if one.piece.distance is None}
    asked = [(lines[one.piece.line], one) for one in stream if one.piece.distance is not None]
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
        if one.piece.distance is None:
            method.feed(one.ids[None])
            continue
        # Step by step: what is fed at once attends to all of itself besides a full cache.
        for token in one.opening:
            logits = method.feed(token.view(1, 1))
        steps = [logits]
        for token in one.answer[:-1]:
            steps.append(method.feed(token.view(1, 1)))
        method.feed(torch.cat([one.answer[-1:], one.newline])[None])
        every = torch.cat(steps)  # [answer tokens, V]
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


def _num_queries(stream: Sequence[EncodedPiece]) -> int:
    return sum(one.piece.distance is not None for one in stream)
