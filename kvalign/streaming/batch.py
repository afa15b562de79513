"""Many streams at once: rows of one batch that begin, go on and end independently of one another.

for row, piece in kvalign.stream_batch(model, tokenizer, prompts, max_new_tokens=200):
    print(row, piece)
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvalign.aligners import Aligner
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import expect, typed
from kvalign.methods import AUTO, make_method
from kvalign.methods.base import Method
from kvalign.models.input_ids import check_fast, encoded
from kvalign.streaming.generation import History, end_ids
from kvalign.streaming.health import check_scores
from kvalign.streaming.sampling import Sampling, StopStrings


def stream_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[str],
    *,
    method: str = AUTO,
    cache_size: int = 128,
    num_sinks: int | None = None,
    num_evicted: int | str | None = None,
    realign_every: int | None = None,
    policy: str | None = None,
    num_recent: int | None = None,
    positions: str | None = None,
    aligner: Aligner | str | Path | None = None,
    compile: bool = False,
    max_rows: int | None = None,
    **sampling: Any,
) -> Iterator[tuple[int, str]]:
    """Continue many prompts at once, and yield pieces of text as they come.

    Row i gives the text that `kvalign.stream` of its prompt alone gives with seed + i.

    Args:
        model: a causal LM of transformers, in eval mode.
        tokenizer: its tokenizer.
        prompts: texts of any lengths; each is read when there is room for it.
        method, cache_size, num_sinks, num_evicted, realign_every, aligner, compile: as in
            `kvalign.make_method`.
        policy, num_recent, positions: likewise.
        max_rows: rows that are stepped at once; a row that ends makes room for the next prompt.
            None: all.
        sampling: as in `kvalign.stream`; without max_new_tokens rows end where the model ends them.

    Yields:
        Number of the row and the next piece of its text.

    Raises:
        UserError: as in `kvalign.stream`, or an empty prompt.
        KeywordError: an unknown setting, with the nearest one.
    """
    settings = Sampling.of(stream_batch, sampling)
    check_fast(tokenizer)
    if isinstance(prompts, str):
        raise UserError("prompts must be several texts; for one there is kvalign.stream")
    expect("prompts", prompts, Iterable, "several texts")
    streaming = make_method(
        method,
        model,
        cache_size=cache_size,
        num_sinks=num_sinks,
        num_evicted=num_evicted,
        realign_every=realign_every,
        policy=policy,
        num_recent=num_recent,
        positions=positions,
        aligner=aligner,
        compile=compile,
    )
    ends = end_ids(model.generation_config) if settings.stop_at_end else []
    decoders: dict[int, DecodeStream] = {}
    stops = defaultdict[int, StopStrings](settings.stops)
    stopped: set[int] = set()

    def ids_of() -> Iterator[list[int]]:
        for row, prompt in enumerate(prompts):
            ids = encoded(prompt, tokenizer, model)
            decoders[row] = DecodeStream(ids=ids, skip_special_tokens=True)
            yield ids

    for row, token in stream_rows(
        streaming,
        ids_of(),
        sampling=settings,
        eos_token_ids=ends,
        stopped=stopped,
        max_rows=max_rows,
    ):
        piece = decoders[row].step(tokenizer.backend_tokenizer, token)
        if piece:
            stops[row].read(piece)
            if stops[row].found:
                stopped.add(row)
            yield row, piece


@torch.no_grad()
def stream_rows(
    method: Method,
    prompts: Iterable[Sequence[int]],
    *,
    sampling: Sampling,
    eos_token_ids: Collection[int] = (),
    stopped: Collection[int] = (),
    max_rows: int | None = None,
) -> Iterator[tuple[int, int]]:
    """Continue prompts of any lengths, stepped together; each is fed alone, then joins.

    Args:
        method: from `make_method`; it is left as it is.
        prompts: ids of each row, at least one.
        sampling: how tokens are chosen; row i draws with seed + i.
        eos_token_ids: tokens that end a row.
        stopped: numbers of rows that end here; the caller adds to them as tokens come.
        max_rows: rows that are stepped at once; None: all.

    Yields:
        Number of the row and its next token.

    Raises:
        UserError: an empty prompt, or a method whose rows cannot be put together.
        RunError: logits that are no numbers; the message says where they come from.
    """
    if max_rows is not None and typed("max_rows", max_rows, int) < 1:
        raise UserError(f"max_rows must be at least 1, got {max_rows}")
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
            row = _Row(number, prompt, sampling, eos_token_ids, stopped, alone.tokens_left)
            yield number, row.choose(alone.feed(prompt), method)
            if not row.has_ended:
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
        going = [i for i, row in enumerate(rows) if not row.has_ended]
        if len(going) < len(rows):
            rows = [rows[i] for i in going]
            if rows:
                batch.select(going)
            else:
                batch = method.new()


class _Row:
    """One stream of a batch: what it has said, and how it chooses."""

    def __init__(
        self,
        number: int,
        prompt: Tensor,
        sampling: Sampling,
        eos_token_ids: Collection[int],
        stopped: Collection[int],
        room: int | None,
    ):
        self.number, self.sampling, self.ends = number, sampling, eos_token_ids
        self.stopped, self.room = stopped, room
        self.history, self.num_new, self.token = History(prompt), 0, -1
        self.processors = sampling.processors()
        self.generator = sampling.generator(prompt.device, number)

    def choose(self, logits: Tensor, method: Method) -> int:
        """The next token, of logits [1, V] that a method gave."""
        scores = self.processors(self.history.ids, logits) if self.processors else logits
        check_scores(scores, logits, method)
        if self.sampling.is_greedy:
            token = scores.argmax(-1)
        else:
            token = torch.multinomial(scores.softmax(-1), 1, generator=self.generator)[:, 0]
        self.history.append(token)
        self.token, self.num_new = int(token), self.num_new + 1
        return self.token

    @property
    def has_ended(self) -> bool:
        is_long = self.num_new == self.sampling.max_new_tokens
        is_long |= self.room is not None and self.history.ids.shape[1] > self.room
        return is_long or self.token in self.ends or self.number in self.stopped
