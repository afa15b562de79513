"""Many streams at once: rows of one batch that begin, continue and end independently of one
another.

for row, piece in kvalign.stream_batch(model, tokenizer, prompts, max_new_tokens=200):
    print(row, piece)
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvalign.foundation.errors import UserError
from kvalign.foundation.names import spelled_out
from kvalign.foundation.settings import typed
from kvalign.methods import make_method
from kvalign.methods.base import Method
from kvalign.methods.choice import warn_if_too_long
from kvalign.methods.registry import AUTO
from kvalign.models.input_ids import check_fast, encoded, unknown_ids
from kvalign.streaming.answer import Answer
from kvalign.streaming.loop import Batch, Row, begin
from kvalign.streaming.sampling import Sampling, StreamConfig
from kvalign.streaming.turns import end_ids


class _AnswerRow(Row):
    """Row that ends with its answer, or where there is no `room` for more ids."""

    number: int
    answer: Answer
    room: float
    piece: str  # text of its last token

    def append(self, token: Tensor, token_ids: Sequence[int], logits: Tensor) -> None:
        super().append(token, token_ids, logits)
        self.piece = self.answer.take(token_ids[0])[0]

    def has_ended(self) -> bool:
        return bool(self.answer.finish) or self.ids.shape[1] >= self.room


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
        config: as in `kvalign.stream`; without max_new_tokens a row ends when the model ends it
            (`stop_at_end`), unless that is given, too.

    Yields:
        The number of the row, and the next piece of its text.

    Raises:
        UserError: as in `kvalign.stream`; an empty prompt; no max_new_tokens for a model of which
            no token ends a text.
        KeywordError: an unknown setting, with the nearest known one.
    """
    has_limit = config.get("max_new_tokens") is not None or "stop_at_end" in config
    sampling, rest = Sampling.of(stream_batch, {"stop_at_end": not has_limit, **config})
    if sampling.lookup:
        raise UserError("lookup is for one stream: rows of a batch are stepped together")
    check_fast(tokenizer)
    if isinstance(prompts, str):
        raise UserError("prompts must be several texts; for one there is kvalign.stream")
    if max_rows is not None and typed("max_rows", max_rows, int) < 1:
        raise UserError(f"max_rows must be at least 1, got {max_rows}")
    num_streams = max_rows or 1
    how: dict[str, Any] = {"compile": None, "num_streams": num_streams, **rest}
    streaming = make_method(method, model, cache_size=cache_size, **how)
    ends = end_ids(streaming.model, tokenizer) if sampling.stop_at_end else []
    if not (has_limit or ends or sampling.stop_strings):
        raise UserError("no token of this model ends a text: give max_new_tokens")
    unknown = unknown_ids(tokenizer, streaming.model.config.vocab_size)
    waiting, batch = enumerate(prompts), Batch[_AnswerRow](streaming)
    while True:
        new: list[tuple[_AnswerRow, Method]] = []
        while max_rows is None or len(batch.rows) + len(new) < max_rows:
            if (next_one := next(waiting, None)) is None:
                break
            number, prompt = next_one
            ids = encoded(prompt, tokenizer, streaming.model)
            if len(ids) == 0:
                raise UserError(f"prompt {number} is empty: give at least one token")
            warn_if_too_long(streaming, len(ids))
            alone, of_row = streaming.new(), torch.tensor([ids], device=streaming.model.device)
            row = _AnswerRow(of_row, **sampling.of_row(of_row.device, number, unknown))
            row.number, row.answer = number, Answer(tokenizer, ids, sampling, ends)
            row.room = math.inf if alone.tokens_left is None else alone.tokens_left + 1
            row.choose(begin(alone, of_row), streaming)
            if row.piece:
                yield number, row.piece
            if not row.has_ended():
                new.append((row, alone))
        if new:
            batch.join((row for row, _ in new), [alone for _, alone in new])
        if not batch.rows:
            return
        for row in batch.step():
            if row.piece:
                yield row.number, row.piece
        batch.leave()
