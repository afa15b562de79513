"""Many streams at once: rows of one batch that begin, continue and end independently of one
another.

for row, piece in kvalign.stream_batch(model, tokenizer, prompts, max_new_tokens=200):
    print(row, piece)
"""

from collections.abc import Iterable, Iterator
from typing import Unpack

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvalign.foundation.errors import UserError
from kvalign.foundation.names import spelled_out
from kvalign.methods import make_method
from kvalign.methods.choice import warn_if_too_long
from kvalign.methods.registry import AUTO
from kvalign.models.input_ids import check_fast, encoded
from kvalign.streaming.answer import Answer
from kvalign.streaming.loop import stream_rows
from kvalign.streaming.sampling import Sampling, StreamConfig
from kvalign.streaming.turns import end_ids


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
    num_streams = max_rows or 1
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
