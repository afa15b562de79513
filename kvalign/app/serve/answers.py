"""Objects that a request waits for: its answers, and the session that is stored with one."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.messages import Message
from kvalign.app.serve.sessions import Session, Sessions, digest
from kvalign.app.serve.tools import Tools
from kvalign.app.serve.turn import AnswerRow, State, TokenLogprob, Turn
from kvalign.methods.base import Method

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """Text of an answer."""

    index: int
    text: str
    tokens: tuple[TokenLogprob, ...] = ()  # with their logprobs, if the request wants them


@dataclass(frozen=True)
class End:
    """Complete answer; a session's is also stored."""

    index: int
    finish: str  # `stop` or `length`
    num_tokens: int
    num_evicted: int  # tokens that left the cache since the answer began

    @classmethod
    def of(cls, row: AnswerRow) -> "End":
        return cls(row.index, row.finish, len(row.token_ids), row.num_evicted)


Event = Piece | End | RequestError
Put = Callable[[Event], None]


@dataclass(eq=False)
class Answers:
    """Answers that a request waits for."""

    num: int  # each ends by an `End`; a `RequestError` ends all
    turns: list[Turn] = field(default_factory=list)
    num_prompt: int = 0  # tokens before the answers, those of the session included
    num_cached: int = 0  # those of them that were not fed anew
    num_edited: int = 0  # those that were, in places that the client changed before others
    num_reencoded: int = 0  # those that were, of turns that stay when older ones go
    num_evicted: int = 0  # those that are out of the cache as the answers begin
    num_forgotten: int = 0  # those of these that are in no memory
    on_cancel: Callable[[], None] = field(default=lambda: None)
    tools: Tools | None = None  # that they may call

    def count(self, method: Method, num_fed: int, num_gone: int) -> None:
        """Count a prompt: the tokens that a method has been fed of it when the answers begin, and
        those of evicted turns.
        """
        self.num_prompt += num_gone + num_fed
        self.num_evicted += num_gone + method.sizes.num_dropped(num_fed)
        self.num_forgotten += num_gone + method.num_forgotten(num_fed)

    def cancel(self) -> None:
        """Cancel the request: the client has left. Finished answers stay."""
        for turn in self.turns:
            turn.is_cancelled = True
        self.on_cancel()


@dataclass(eq=False)
class SessionUpdate:
    """Session of a turn: stored when its answer is complete, else unchanged."""

    sessions: Sessions
    messages: Sequence[Message]  # of the turn
    session: Session  # as its answer begins; it says what was said before the turn
    ids: Tensor  # all its tokens then
    writer: Executor  # keeps sessions one after the other, beside the engine
    put: Put  # told of the end
    tools: Tools | None = None  # that the answer may call
    _end: threading.Lock = field(default_factory=threading.Lock)  # taken by what comes first

    def ended(self, row: AnswerRow, state: State | None) -> None:
        if self._end.acquire(blocking=False):
            self.writer.submit(self._keep, row, state)

    def release(self, error: RequestError | None = None) -> None:
        """The turn failed, or the client has left."""
        if self._end.acquire(blocking=False):
            self.sessions.release(self.session)
            if error is not None:
                self.put(error)

    def _keep(self, row: AnswerRow, state: State | None) -> None:
        answer = Message(role="assistant", content=row.text)
        if self.tools is not None:
            answer = self.tools.message(row.text)
        how = self.session.comparison
        turn_digest, messages_digest = digest(
            self.session.messages_digest, [*self.messages, answer], how
        )[-2:]
        ids = torch.cat([self.ids, torch.tensor(row.token_ids, dtype=torch.int64)])
        grown = replace(
            self.session,
            messages_digest=messages_digest,
            turn_digest=turn_digest,
            answer=row.text,
            finish=row.finish,
            ids=ids,
            num_fed=len(ids) - 1,
            num_new=len(row.token_ids),
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
