"""The loop of every stream: choose a token of each row, feed it, and again.

`stream_tokens` and `stream_rows` run it as iterators of tokens; the server runs it in a thread of
its own.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from kvalign.foundation.autograd import no_autograd_modes
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import expect, typed
from kvalign.methods.base import Method
from kvalign.models.input_ids import check_ids
from kvalign.streaming.generate_settings import check_processors
from kvalign.streaming.health import most_likely, no_token
from kvalign.streaming.lookup import Lookup, check_lookup
from kvalign.streaming.sampling import Sampling


class Row:
    """One text of a batch, or several that begin and end together: the tokens so far, and the
    choice of the next ones. Only this class chooses tokens.

    Args:
        ids: [B, T] int64, the tokens before.
        processors: transformers' logits processors; they see all ids.
        do_sample: draw from the processed distribution; otherwise take the most likely token.
        generator: source of the draws; None: torch's global one.
        lookup: most tokens that are guessed at a time while the row is alone in its batch.

    Attributes:
        token: [B] int64, the last one, which is fed next.
    """

    def __init__(
        self,
        ids: Tensor,
        processors: LogitsProcessorList | None = None,
        do_sample: bool = False,
        generator: torch.Generator | None = None,
        lookup: int = 0,
    ):
        self.processors, self.do_sample, self.generator = processors, do_sample, generator
        self.lookup = Lookup(lookup, ids[0].tolist()) if lookup else None
        self.token, self._ids, self._len = ids[:, -1], ids, ids.shape[1]

    @property
    def ids(self) -> Tensor:
        """All ids so far [B, T]."""
        return self._ids[:, : self._len]

    def choose(self, logits: Tensor, method: Method) -> Tensor:
        """Return the next token of each text [B] int64, from logits [B, V]; RunError if there is
        none.
        """
        scores = self.processors(self.ids, logits) if self.processors else logits
        token, is_one = most_likely(scores)
        if not is_one.all():
            raise no_token(logits, method)
        if self.do_sample:
            token = torch.multinomial(scores.softmax(-1), 1, generator=self.generator)[:, 0]
        return token

    def append(self, token: Tensor) -> None:
        """Append chosen tokens [B]. The buffer of ids doubles when it is full, so an endless stream
        is not copied at each token.
        """
        if self._len == self._ids.shape[1]:
            with no_autograd_modes():
                self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)], 1)
        self._ids[:, self._len] = self.token = token
        self._len += 1
        if self.lookup is not None:
            self.lookup.append(int(token))

    def advance(self, logits: Tensor, method: Method) -> int:
        """Choose and append the next token of one text, from logits [1, V]."""
        self.append(self.choose(logits, method))
        return int(self.token)


R = TypeVar("R", bound=Row)


class Batch(Generic[R]):
    """Rows that a method steps together. Rows join when their prompts have been fed, and leave when
    they end.

    Attributes:
        method: has been fed all tokens of the rows but the last ones.
        rows: in the order of the method's rows.
    """

    def __init__(self, method: Method, rows: Iterable[R] = ()):
        self.method, self.rows = method, [*rows]

    def join(self, rows: Iterable[R], methods: Sequence[Method]) -> None:
        """Append rows of methods with the same arguments, which begin again. The first method takes
        the place of one without rows.
        """
        if not self.rows:
            self.method, *methods = methods
        self.rows += rows
        self.method.join(methods)
        for method in methods:
            method.reset()

    def feed(self) -> Tensor:
        """Feed the last token of each row: logits [B, V] of the next ones."""
        first, *others = self.rows
        if others:
            return self.method.feed(torch.cat([row.token for row in self.rows])[:, None])
        if first.lookup is not None:
            return first.lookup.feed(self.method)
        return self.method.feed(first.token[:, None])

    def keep(self, goes_on: Sequence[bool]) -> None:
        """Keep the rows that go on."""
        kept = [i for i, goes in enumerate(goes_on) if goes]
        if len(kept) < len(self.rows):
            self.rows = [self.rows[i] for i in kept]
            if kept:
                self.method.select(kept)


@torch.no_grad()
def stream_tokens(
    method: Method,
    prompt: Tensor,
    *,
    processors: LogitsProcessorList | None = None,
    criteria: StoppingCriteriaList | None = None,
    do_sample: bool = False,
    eos_token_ids: Collection[int] = (),
    pad_token_id: int | None = None,
    generator: torch.Generator | None = None,
    before: Tensor | None = None,
    mask: Tensor | None = None,
    lookup: int = 0,
) -> Iterator[Tensor]:
    """Feed a prompt and yield new tokens [B] int64, without end unless the criteria stop it or
    every row has ended.

    Args:
        method: from `make_method`.
        prompt: [B, T] int64, T >= 1; rows of unequal lengths are padded on the left.
        processors: transformers' logits processors; they see the whole history.
        criteria: transformers' stopping criteria, checked after each token.
        do_sample: draw from the processed distribution; otherwise take the most likely token.
        eos_token_ids: tokens that end a row; empty: none.
        pad_token_id: yielded for an ended row; default: the first end token.
        generator: source of random numbers; default: torch's global one.
        before: [B, P] int64, the tokens that the method has been fed, when the prompt continues its
            stream; processors and criteria see them too. The prompt then begins with the last token
            that was yielded, which has not been fed. None begins a new stream.
        mask: [B, T], 0 where a prompt is padded; None: no padding.
        lookup: most tokens of one stream that are guessed at a time and read in the same pass
            (`kvalign.streaming.lookup`). The tokens are the same, but come sooner. 0: none.

    Raises:
        UserError: an empty prompt, or one with padding other than on the left; a processor that
            calls the model; lookup for several rows, or with a method that cannot undo guesses.
        RunError: non-finite logits; the message says where they come from.
    """
    expect("method", method, Method, "one of kvalign.make_method")
    check_ids(prompt)  # what is fed of it is compared with the vocabulary
    check_processors(processors)
    ids = prompt if before is None else torch.cat([before, prompt], 1)
    if lookup:
        check_lookup(method)
        if len(ids) > 1:
            raise UserError(f"lookup is for one stream, got {len(ids)} rows")
    row = Row(ids, processors, do_sample, generator, lookup)
    batch = Batch(method, [row])
    ends = torch.tensor(sorted(eos_token_ids), device=prompt.device)
    pad = pad_token_id if pad_token_id is not None else (ends[0] if len(ends) else 0)
    going = torch.ones(len(prompt), dtype=torch.bool, device=prompt.device)
    if before is None:
        method.reset()
    logits = method.feed(prompt) if mask is None or mask.all() else _feed_rows(method, prompt, mask)
    while True:
        row.append(torch.where(going, row.choose(logits, method), pad))
        yield row.token
        if len(ends):
            going = going & ~torch.isin(row.token, ends)
        if criteria:
            going = going & ~criteria(row.ids, None)
        if not going.any() or method.tokens_left == 0:
            return
        logits = batch.feed()


def _feed_rows(method: Method, prompt: Tensor, mask: Tensor) -> Tensor:
    """Begin a stream with the prompts of a batch, each fed alone, without its padding."""
    mask = mask.to(prompt.device).bool()
    if mask.shape != prompt.shape or not mask[:, -1].all() or (mask[:, :-1] > mask[:, 1:]).any():
        raise UserError(
            "prompts of unequal lengths are padded on the left (padding_side='left'), got another "
            "attention mask"
        )
    rows = [method.new() for _ in prompt]
    logits = [row.feed(ids[own][None]) for row, ids, own in zip(rows, prompt, mask, strict=True)]
    method.join(rows)
    return torch.cat(logits)


class _NumberedRow(Row):
    """Row that ends when it is `most` ids long."""

    number: int
    most: float


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

    def goes_on(row: _NumberedRow) -> bool:
        return row.ids.shape[1] < row.most and not has_ended(row.number)

    waiting, batch = enumerate(prompts), Batch[_NumberedRow](method)
    while True:
        begun: list[tuple[_NumberedRow, Method]] = []
        while max_rows is None or len(batch.rows) + len(begun) < max_rows:
            number, ids = next(waiting, (None, None))
            if number is None or ids is None:
                break
            if len(ids) == 0:
                raise UserError(f"prompt {number} is empty: give at least one token")
            alone = method.new()
            prompt = torch.tensor([list(ids)], device=method.model.device)
            room = math.inf if alone.tokens_left is None else alone.tokens_left
            row = _NumberedRow(prompt, **sampling.of_row(prompt.device, number))
            row.number = number
            row.most = min(room + 1, len(ids) + (sampling.max_new_tokens or math.inf))
            yield number, row.advance(alone.feed(prompt), method)
            if goes_on(row):
                begun.append((row, alone))
        if begun:
            batch.join((row for row, _ in begun), [alone for _, alone in begun])
        if not batch.rows:
            return
        logits = batch.feed()
        for i, row in enumerate(batch.rows):
            yield row.number, row.advance(logits[i : i + 1], method)
        batch.keep([goes_on(row) for row in batch.rows])
