"""The loop of every stream: choose a token of each row, feed it, and again.

`stream_tokens` runs it as an iterator of tokens, `stream_batch` (`batch.py`) of many texts, and the
server in a thread of its own.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import expect
from kvalign.methods.base import Method, check_ids
from kvalign.models.wrapped import no_autograd_modes

if TYPE_CHECKING:
    from kvalign.streaming.lookup import Lookup


class Row:
    """One text of a batch, or several that begin and end together: the tokens so far, and the
    choice of the next ones. Only this class chooses tokens.

    Args:
        ids: [B, T] int64, the tokens before.
        processors, do_sample, generator, lookup: as of `stream_tokens`.
        draws: equal for rows that choose alike, each by its own scores; None: like no other.

    Attributes:
        token: [B] int64, the last one, which is fed next.
        is_over: [B] bool, which of several texts have ended; they go on with `pad`. None: none can.
    """

    pad: int = 0
    lookup: "Lookup | None" = None

    def __init__(
        self,
        ids: Tensor,
        processors: LogitsProcessorList | None = None,
        do_sample: bool = False,
        generator: torch.Generator | None = None,
        lookup: int = 0,
        draws: object = None,
    ):
        self.processors, self.do_sample, self.generator = processors, do_sample, generator
        self.draws = draws
        if lookup:
            from kvalign.streaming.lookup import Lookup

            self.lookup = Lookup(lookup, ids[0].tolist())
        self.token, self._ids, self._len = ids[:, -1], ids, ids.shape[1]
        self.is_over: Tensor | None = None

    @property
    def ids(self) -> Tensor:
        """All ids so far [B, T]."""
        return self._ids[:, : self._len]

    def has_ended(self) -> bool:
        """Return whether the row has ended; asked once after each token."""
        return False

    def choose(self, logits: Tensor, method: Method) -> None:
        """Choose each text's next token from logits [B, V], and append it; RunError without one."""
        choose_all([self], logits, method)

    def append(self, token: Tensor, token_ids: Sequence[int], logits: Tensor) -> None:
        """Append the next token of each text, [B] int64, which was chosen by these logits. The
        buffer of ids doubles when it is full, so an endless stream is not copied at each token.
        """
        if self.is_over is not None:
            token = torch.where(self.is_over, self.pad, token)
        if self._len == self._ids.shape[1]:
            with no_autograd_modes():
                self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)], 1)
        self._ids[:, self._len] = self.token = token
        self._len += 1
        if self.lookup is not None:
            self.lookup.append(token_ids[0])

    def fail(self, error: Exception) -> None:
        """Say why it cannot continue."""
        raise error


def choose_all(rows: Sequence[Row], logits: Tensor, method: Method) -> None:
    """Let rows choose the next tokens of their texts from logits [B, V], and append them; RunError
    for one that has none. The device is asked for numbers once, however many rows there are, and
    rows that draw alike are computed together.
    """
    parts = logits.split([len(row.token) for row in rows])
    alike: dict[object, list[int]] = {}
    for i, row in enumerate(rows):
        alike.setdefault(i if row.draws is None else row.draws, []).append(i)
    tokens, bests = {}, {}
    for numbers in alike.values():
        try:
            own = logits if len(numbers) == len(rows) else torch.cat([parts[i] for i in numbers])
            found = _choose_alike([rows[i] for i in numbers], own)
        except Exception as error:
            for i in numbers:
                rows[i].fail(error)
            continue
        for i, token, best in zip(numbers, *found, strict=True):
            tokens[i], bests[i] = token, best
    if not tokens:
        return
    both = torch.stack([torch.cat([*tokens.values()]), torch.cat([*bests.values()]).isfinite()])
    asked = zip(*both.tolist(), strict=True)
    for i, token in tokens.items():
        token_ids, are_finite = zip(*islice(asked, len(token)), strict=True)
        try:
            if not all(are_finite):
                from kvalign.streaming.scoring import no_token

                raise no_token(parts[i], method)
            rows[i].append(token, token_ids, parts[i])
        except Exception as error:
            rows[i].fail(error)


def _choose_alike(rows: Sequence[Row], logits: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Next tokens and greatest scores of rows that choose alike: [B] each, by row."""
    first, sizes = rows[0], [len(row.token) for row in rows]
    scores = first.processors(first.ids, logits) if first.processors else logits
    best, token = scores.max(-1)  # NaN counts as the greatest number
    if first.do_sample:
        # As `torch.multinomial` draws, which asks the device whether these are probabilities.
        shares = scores.softmax(-1)
        noise = torch.empty_like(shares)
        for row, own in zip(rows, noise.split(sizes), strict=True):
            own.exponential_(generator=row.generator)
        token = (shares / noise).argmax(-1)
    return token.split(sizes), best.split(sizes)


R = TypeVar("R", bound=Row)


class Batch(Generic[R]):
    """Rows that a method steps together. Rows join when their prompts have been fed, and leave when
    they have ended.

    Attributes:
        method: has been fed all tokens of the rows but the last ones.
        rows: in the order of the method's rows.
    """

    def __init__(self, method: Method, rows: Iterable[R] = ()):
        self.method, self.rows = method, [*rows]

    def join(self, rows: Iterable[R], methods: Sequence[Method]) -> None:
        """Append rows of methods, which begin again; the first one replaces one without rows."""
        if not self.rows:
            self.method, *methods = methods
        self.rows += rows
        self.method.join(methods)
        for method in methods:
            method.reset()

    @torch.no_grad()
    def step(self) -> Sequence[R]:
        """Feed the last token of each row, and let the row take the next one. Returns the rows."""
        first, *others = self.rows
        if others:
            logits = self.method.feed(torch.cat([row.token for row in self.rows])[:, None])
            choose_all(self.rows, logits, self.method)
        elif first.lookup is not None:
            first.choose(first.lookup.feed(self.method), self.method)
        else:
            first.choose(self.method.feed(first.token[:, None]), self.method)
        return self.rows

    def leave(self) -> None:
        """Let rows that have ended leave."""
        numbers = [number for number, row in enumerate(self.rows) if not row.has_ended()]
        if len(numbers) < len(self.rows):
            self.rows = [self.rows[number] for number in numbers]
            if numbers:
                self.method.select(numbers)


class _Texts(Row):
    """Texts that begin together, and end with the last of them, or with the method's positions."""

    method: Method
    ends: Tensor
    criteria: StoppingCriteriaList | None

    def has_ended(self) -> bool:
        if self.is_over is not None:
            self.is_over = self.is_over | torch.isin(self.token, self.ends)
            if self.criteria:
                self.is_over = self.is_over | self.criteria(self.ids, None)
            if self.is_over.all():
                return True
        return self.method.tokens_left == 0


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
        do_sample: draw from the processed distribution, instead of the most likely token.
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
        UserError: an empty prompt, or one with padding other than on the left; lookup for several
            rows, or with a method that cannot undo guesses.
        RunError: non-finite logits; the message says where they come from.
    """
    expect("method", method, Method, "one of kvalign.make_method")
    check_ids(prompt)  # what is fed of it is compared with the vocabulary
    ids = prompt if before is None else torch.cat([before, prompt], 1)
    if lookup:
        from kvalign.streaming.lookup import check_lookup

        check_lookup(method)
        if len(ids) > 1:
            raise UserError(f"lookup is for one stream, got {len(ids)} rows")
    row = _Texts(ids, processors, do_sample, generator, lookup)
    row.method, row.criteria = method, criteria
    row.ends = torch.tensor([*eos_token_ids], dtype=torch.int64, device=prompt.device)
    row.pad = next(iter(eos_token_ids), 0) if pad_token_id is None else pad_token_id
    if eos_token_ids or criteria:
        row.is_over = torch.zeros_like(row.token, dtype=torch.bool)
    if before is None:
        method.reset()
    row.choose(begin(method, prompt, mask), method)
    batch = Batch(method, [row])
    while True:
        yield row.token
        if row.has_ended():
            return
        batch.step()


@torch.no_grad()  # of which generators are not made: one that is left complains as Python ends
def begin(method: Method, prompt: Tensor, mask: Tensor | None = None) -> Tensor:
    """Begin a stream with prompts [B, T]; those with padding are fed alone, without it. UserError:
    padding elsewhere than on the left.
    """
    if mask is None or mask.all():
        return method.feed(prompt)
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
