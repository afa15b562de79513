"""Many streams at once: rows of one batch that begin, continue and end independently of one
another.

for row, piece in kvalign.stream_batch(model, tokenizer, prompts, max_new_tokens=200):
    print(row, piece)
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvalign.foundation.errors import UserError
from kvalign.foundation.names import spelled_out
from kvalign.foundation.settings import expect, typed
from kvalign.methods import AUTO, make_method
from kvalign.methods.base import Method
from kvalign.methods.choice import warn_if_too_long
from kvalign.models.input_ids import check_fast, encoded
from kvalign.streaming.answer import Answer
from kvalign.streaming.choosing import Chooser
from kvalign.streaming.ends import end_ids
from kvalign.streaming.sampling import Sampling, StreamConfig


@spelled_out(StreamConfig)
def stream_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[str],
    *,
    method: str = AUTO,
    cache_size: int | None = None,
    max_rows: int | None = None,
    **config: Unpack[StreamConfig],
) -> Iterator[tuple[int, str]]:
    """Continue many prompts at once, and yield pieces of text as they come.

    Row i gives the text that `kvalign.stream` gives for its prompt alone, with seed + i.

    Args:
        model: a causal LM of transformers, or a wrapped one: see `kvalign.make_method`.
        tokenizer: its tokenizer.
        prompts: texts of any lengths; each is read when there is a free row.
        method, cache_size: as in `kvalign.make_method`.
        max_rows: most rows in one step; a row that ends makes room for the next prompt. None: all.
        config: as in `kvalign.stream`; without max_new_tokens a row ends when the model ends it.

    Yields:
        The number of the row, and the next piece of its text.

    Raises:
        UserError: as in `kvalign.stream`, or an empty prompt.
        KeywordError: an unknown setting, with the nearest known one.
    """
    sampling, rest = Sampling.of(stream_batch, config)
    if sampling.lookup:
        raise UserError("lookup is for one stream: rows of a batch are stepped together")
    check_fast(tokenizer)
    if isinstance(prompts, str):
        raise UserError("prompts must be several texts; for one there is kvalign.stream")
    expect("prompts", prompts, Iterable, "several texts")
    num_streams = max(1, typed("max_rows", max_rows or 1, int))
    streaming = make_method(method, model, cache_size=cache_size, num_streams=num_streams, **rest)
    ends = end_ids(streaming.model, tokenizer) if sampling.stop_at_end else []
    answers: list[Answer] = []

    def ids_of() -> Iterator[list[int]]:
        for prompt in prompts:
            ids = encoded(prompt, tokenizer, streaming.model)
            warn_if_too_long(streaming, len(ids))
            answers.append(Answer(tokenizer, ids, sampling, ends))
            yield ids

    def has_ended(row: int) -> bool:
        return bool(answers[row].finish)

    for row, token in stream_rows(
        streaming, ids_of(), sampling=sampling, has_ended=has_ended, max_rows=max_rows
    ):
        piece, _ = answers[row].take(token)
        if piece:
            yield row, piece


@dataclass
class _Row:
    """One stream of a batch: it ends when it is `most` ids long, its last token is fed next."""

    number: int
    chooser: Chooser
    most: float
    token: int = -1

    def choose(self, logits: Tensor, method: Method) -> int:
        self.token = int(self.chooser.choose(logits, method))
        self.chooser.append(self.token)
        return self.token


@torch.no_grad()
def stream_rows(
    method: Method,
    prompts: Iterable[Sequence[int]],
    *,
    sampling: Sampling,
    has_ended: Callable[[int], bool] = lambda row: False,
    max_rows: int | None = None,
) -> Iterator[tuple[int, int]]:
    """Continue prompts of any lengths, stepped together; each is fed alone, then joins.

    Args:
        method: from `make_method`; it stays unchanged.
        prompts: ids of each row, at least one.
        sampling: how tokens are chosen, and how many; row i draws with seed + i.
        has_ended: called after each token with the row's number; returns whether the row ends
            there.
        max_rows: most rows in one step; None: all.

    Yields:
        The number of the row, and its next token.

    Raises:
        UserError: an empty prompt, or a method whose rows cannot be joined.
        RunError: non-finite logits; the message says where they come from.
    """
    if max_rows is not None and typed("max_rows", max_rows, int) < 1:
        raise UserError(f"max_rows must be at least 1, got {max_rows}")

    def goes_on(row: _Row) -> bool:
        return row.chooser.ids.shape[1] < row.most and not has_ended(row.number)

    waiting, batch = enumerate(prompts), method.new()
    rows: list[_Row] = []
    while True:
        begun: list[tuple[_Row, Method]] = []
        while max_rows is None or len(rows) + len(begun) < max_rows:
            number, ids = next(waiting, (None, None))
            if number is None or ids is None:
                break
            if len(ids) == 0:
                raise UserError(f"prompt {number} is empty: give at least one token")
            alone = method.new()
            prompt = torch.tensor([list(ids)], device=method.model.device)
            room = math.inf if alone.tokens_left is None else alone.tokens_left
            most = min(room + 1, len(ids) + (sampling.max_new_tokens or math.inf))
            row = _Row(number, sampling.chooser(prompt, number), most)
            yield number, row.choose(alone.feed(prompt), method)
            if goes_on(row):
                begun.append((row, alone))
        if begun:
            batch.join([alone for _, alone in begun])
            rows += [row for row, _ in begun]
        if not rows:
            return
        tokens = torch.tensor([[row.token] for row in rows], device=method.model.device)
        logits = batch.feed(tokens)
        for i, row in enumerate(rows):
            yield row.number, row.choose(logits[i : i + 1], method)
        going = [i for i, row in enumerate(rows) if goes_on(row)]
        if len(going) < len(rows):
            rows = [rows[i] for i in going]
            if rows:
                batch.select(going)
            else:
                batch = method.new()
