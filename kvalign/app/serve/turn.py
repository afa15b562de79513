"""A request to the engine: its turns and their answers, and the session that is stored with one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from kvalign.app.serve.cache_view import Place
from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.messages import Message
from kvalign.app.serve.prompts import Change
from kvalign.app.serve.reading import PieceReader, Reading
from kvalign.app.serve.sessions import Session, Sessions, StateDict, digest
from kvalign.foundation.errors import RunError
from kvalign.methods.base import Method
from kvalign.models.input_ids import unknown_ids
from kvalign.streaming.answer import Answer, token_bytes
from kvalign.streaming.loop import Row
from kvalign.streaming.sampling import Sampling

log = logging.getLogger(__name__)
PAUSE_S = 0.1
"""Seconds between two tokens after which an answer tells what its cache holds."""
NOT_FINITE = RequestError("the model's logits for this text are not finite", 500, code="not_finite")
OUR_FAULT = RequestError("an error of the server ended this answer", 500, code="stream_failed")


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer and its logprob, beside those of the likeliest tokens."""

    spelled: bytes
    logprob: float  # nats
    top: tuple[tuple[bytes, float], ...]  # the likeliest first
    offset: int  # characters of the answer's text before it


@dataclass(frozen=True)
class Rules:
    """Rules by which the answers of a request are chosen, read and told."""

    sampling: Sampling
    tokenizer: PreTrainedTokenizerBase
    ends: Collection[int]  # tokens that end one
    put: Put
    num_top: int | None  # likeliest tokens that are told beside each; None: no logprobs are
    constraint: Callable[[int], LogitsProcessor] | None  # to a form, after so many tokens
    reading: Reading  # its special tokens are shown


class AnswerRow(Row):
    """One answer of a turn: `index` is its number within the request, `ids` [T] int64 are all
    tokens before it, and it draws with seed + `draw`.

    Attributes:
        turn: whose answer it is, once that has begun.
        place: of its stream in the conversation, if the request wants to know what is held.
        told_s: time at which that was told last.
        failure: why it cannot continue.
        since_s: time of its last token; at first, of the request.
    """

    turn: Turn
    place: Place | None = None
    told_s = 0.0

    def __init__(self, rules: Rules, index: int, draw: int, ids: Tensor, method: Method):
        before, device = ids.tolist(), method.model.device
        sampling, tokenizer, reading = rules.sampling, rules.tokenizer, rules.reading
        unknown = unknown_ids(tokenizer, method.model.config.vocab_size)
        drawing = sampling.of_row(device, draw, unknown)
        if rules.constraint is not None:  # before what chooses among the likeliest
            drawing["processors"].insert(0, rules.constraint(len(before)))
            drawing["draws"] = None
        super().__init__(ids[None].to(device), **drawing, lookup=sampling.lookup)
        self.rules, self.index, self._sizes, self._num_before = rules, index, method.sizes, len(ids)
        self.failure: RequestError | None = None
        self.text, self.since_s = "", time.perf_counter()
        self._answer = Answer(tokenizer, before, sampling, rules.ends, reading.spelled(tokenizer))
        self._single = PieceReader(reading) if reading.is_single else None
        self.token_ids = self._answer.token_ids
        self._num_said = 0  # characters of its tokens so far

    @property
    def finish(self) -> str:
        """Reason for its end, as of `Answer`."""
        return self._answer.finish

    @property
    def is_whole(self) -> bool:
        return bool(self.finish) and self.failure is None

    def has_ended(self) -> bool:
        return bool(self.finish) or self.failure is not None or self.turn.is_cancelled

    @property
    def num_evicted(self) -> int:
        num_fed = self._num_before + len(self.token_ids) - 1
        return self._sizes.num_dropped(num_fed) - self._sizes.num_dropped(self._num_before)

    def append(self, token: Tensor, token_ids: Sequence[int], logits: Tensor) -> None:
        super().append(token, token_ids, logits)
        if self.turn.is_cut:
            self._answer.most = 1
        piece, text = self._answer.take(token_ids[0])
        self.text += text
        if self._single is not None and text:
            self._single.read(text)
            if self._single.has_call:
                self._answer.finish = "stop"
        logprobs = self._logprobs_of(logits, token_ids[0], piece)
        if text or logprobs:
            self.rules.put(AnswerPiece(self.index, text, logprobs))

    def is_cache_due(self) -> bool:
        """Return whether the request wants to know what is held after the next token."""
        return self.place is not None and time.perf_counter() - self.told_s >= PAUSE_S

    def tell_cache(self, place: Place, recalled: list[list[int]]) -> None:
        """Tell what its cache holds, and what its last step took back."""
        if len(self.token_ids) > 1:  # the first has taken nothing back alone: the next is told, too
            self.told_s = time.perf_counter()
        num_fed = place.num_before + len(self.token_ids) - 1
        held = place.holds(num_fed) if self._sizes.is_oldest else {}  # else each head has its own
        view = {"num_tokens": num_fed + 1 + place.num_gone, **held, "recalled": recalled}
        self.rules.put(AnswerPiece(self.index, "", cache=view))

    def fail(self, error: Exception) -> None:
        """End with an error, which is this row's alone."""
        if isinstance(error, RequestError):
            self.failure = error
            return
        log.error("a token could not be taken", exc_info=error)
        self.failure = NOT_FINITE if isinstance(error, RunError) else OUR_FAULT

    def _logprobs_of(self, logits: Tensor, token: int, piece: str) -> tuple[TokenLogprob, ...]:
        """A token with its logprob, if that is wanted: by the model's own logits [1, V], before
        sampling changes them. `piece` is what it adds to the text, less where it is a part of a
        character, and more where it follows one that no token completes.
        """
        self._num_said += len(piece)
        num_top, tokenizer = self.rules.num_top, self.rules.tokenizer
        if num_top is None or token in self.rules.ends:
            return ()
        logprobs = logits[0].float().log_softmax(-1)
        values, tokens = logprobs.topk(min(num_top, len(logprobs)))
        best = zip(tokens.tolist(), values.tolist(), strict=True)
        top = [(token_bytes(tokenizer, one), value) for one, value in best]
        spelled = token_bytes(tokenizer, token)
        start = self._num_said - min(len(spelled.decode(errors="replace")), len(piece))
        return (TokenLogprob(spelled, float(logprobs[token]), tuple(top), start),)


@dataclass(eq=False)
class Turn:
    """One request to the engine: tokens to read and to answer, once or several times."""

    method: Method  # the turn's own, which has been fed nothing
    state: StateDict | None  # what it takes up first; None: it begins
    rest: Tensor  # [T] int64, what is still to be fed, T >= 1 at first
    rows: Sequence[AnswerRow]  # the answers, drawn from one prompt; none once they have begun
    put: Put
    update: SessionUpdate | None = None  # which wants the state after a whole answer
    changes: list[Change] = field(default_factory=list)
    """Changes of what its state holds, in order: the last is made first, all before it is fed."""
    is_cancelled: bool = False  # by whoever waits no longer; its rows go before the next step
    is_cut: bool = False  # its answers end with their next tokens

    def restore(self) -> None:
        if self.state is not None:
            self.method.restore(self.state)
            self.state = None

    def change(self, most: int) -> int:
        """Make the last change, or at most so many new tokens of it; return how many were fed."""
        start, stop, new = self.changes.pop()
        now, rest = new[:most], new[most:]
        ids = [torch.tensor([now], device=self.method.model.device)] if now else []
        self.method.edit(start, stop, *ids)
        if rest:
            self.changes.append(Change(start + len(now), start + len(now), rest))
        return len(now)

    def ended(self, row: AnswerRow, state: StateDict | None) -> None:
        """An answer is complete; the state is after all but its last token, None if not needed."""
        if self.update is None:
            self.put(End.of(row))
        else:
            self.update.ended(row, state)

    def failed(self, error: RequestError) -> None:
        (self.update.release if self.update else self.put)(error)

    def cancel(self) -> None:
        """The client has left. Finished answers stay."""
        self.is_cancelled = True
        if self.update is not None:
            self.update.release()

    def begin(self) -> Sequence[AnswerRow]:
        """Return the rows, each of which knows its turn from now on. The turn no longer knows them:
        of a circle only Python's collector would free the cache.
        """
        rows, self.rows = self.rows, ()
        for row in rows:
            row.turn = self
        return rows


def states_of(batch: Method, rows: list[int]) -> list[StateDict]:
    """Return the states of some rows of a batch, each alone; the batch stays unchanged."""
    if not rows:
        return []
    several, states = batch.new(), []
    several.join([batch])
    several.select(rows)
    for i in range(len(rows)):
        one = batch.new()
        one.join([several])
        one.select([i])
        states.append(one.state())
    return states


@dataclass(frozen=True)
class AnswerPiece:
    index: int
    text: str
    tokens: tuple[TokenLogprob, ...] = ()  # with their logprobs, if the request wants them
    cache: dict[str, Any] | None = None  # what is held after a token, if the request wants it


@dataclass(frozen=True)
class End:
    """Complete answer; a session's is also stored."""

    index: int
    finish: str  # `stop` or `length`
    num_tokens: int
    num_evicted: int  # tokens that left the cache since the answer began
    num_thoughts: int = 0  # of its tokens, those of its thoughts

    @classmethod
    def of(cls, row: AnswerRow) -> End:
        num = row.rules.reading.num_thoughts(row.rules.tokenizer, row.token_ids)
        return cls(row.index, row.finish, len(row.token_ids), row.num_evicted, num)


Event = AnswerPiece | End | RequestError
Put = Callable[[Event], None]


@dataclass(eq=False)
class Answers:
    num: int  # each ends by an `End`; a `RequestError` ends all
    reading: Reading
    turns: list[Turn] = field(default_factory=list)
    num_prompt: int = 0  # tokens before the answers, those of the session included
    num_cached: int = 0  # those of them that were not fed anew
    num_edited: int = 0  # those that were, in places that the client changed before others
    num_reencoded: int = 0  # those that were, of turns that stay when older ones go
    num_evicted: int = 0  # those that are out of the cache as the answers begin
    num_forgotten: int = 0  # those of these that are in no memory

    def count(self, method: Method, num_fed: int, num_gone: int) -> None:
        """Count a prompt: tokens fed when the answers begin, and those of evicted turns."""
        self.num_prompt += num_gone + num_fed
        self.num_evicted += num_gone + method.sizes.num_dropped(num_fed)
        self.num_forgotten += num_gone + method.num_forgotten(num_fed)

    def cancel(self) -> None:
        for turn in self.turns:
            turn.cancel()


@dataclass(eq=False)
class SessionUpdate:
    """Session of a turn: stored when its answer is complete, else unchanged."""

    sessions: Sessions
    messages: Sequence[Message]  # of the turn; none where the last answer goes on
    session: Session  # as its answer begins; it says what was said before the turn
    ids: Tensor  # all its tokens then
    writer: Executor  # keeps sessions one after the other, beside the engine
    put: Put  # told of the end
    _end: threading.Lock = field(default_factory=threading.Lock)  # taken by what comes first

    def ended(self, row: AnswerRow, state: StateDict | None) -> None:
        if self._end.acquire(blocking=False):
            self.writer.submit(self._keep, row, state)

    def release(self, error: RequestError | None = None) -> None:
        """The turn failed, or the client has left."""
        if self._end.acquire(blocking=False):
            self.sessions.release(self.session)
            if error is not None:
                self.put(error)

    def _keep(self, row: AnswerRow, state: StateDict | None) -> None:
        text, num_new = row.text, len(row.token_ids)
        if not self.messages:
            text, num_new = self.session.answer + text, self.session.num_new + num_new
        before, answer = self.session.messages_digest, row.rules.reading.message(text)
        digests = [before, *digest(before, [*self.messages, answer])]
        ids = torch.cat([self.ids, torch.tensor(row.token_ids, dtype=torch.int64)])
        grown = replace(
            self.session,
            messages_digest=digests[-1],
            turn_digest=digests[-2],
            answer=text,
            finish=row.finish,
            ids=ids,
            num_fed=len(ids) - 1,
            num_new=num_new,
            state=state,
        )
        try:
            self.sessions.put(grown)
        except Exception as error:
            self.sessions.release(self.session)
            if not isinstance(error, RequestError):  # it may name paths
                log.error("an answer was not saved: %s", error)
                what = "this answer was not saved: its session cannot be written"
                error = RequestError(what, 500, code="not_kept")
            self.put(error)
        else:
            self.put(End.of(row))
