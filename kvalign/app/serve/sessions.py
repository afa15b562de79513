"""Sessions: conversations whose caches are kept between requests, in memory or in a folder.

A session changes when a turn's answer is whole, and only then: a client that leaves, a sick row or
a killed server leave it as it was before the turn.
"""

import hashlib
import json
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.wire import Message
from kvalign.foundation.errors import UserError

NAMELESS = "~"  # begins the id of a session that no request named


@dataclass(frozen=True)
class Session:
    """One conversation, or one text that goes on."""

    id: str  # as requests name it
    said: str = ""  # a digest of its messages, answers included
    asked: str = ""  # the same before the last answer
    answer: str = ""  # the last one
    finish: str = ""  # why that ended
    system: str | None = None  # what its first message told the model
    num_sinks: int = 0
    ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [T], all
    num_fed: int = 0  # tokens that its method has been fed
    num_new: int = 0  # tokens of the last answer
    turns: tuple[int, ...] = ()  # where in `ids` each begins
    state: dict[str, Tensor] | None = None  # after `num_fed`; None: of nothing, or its file has it

    @property
    def is_new(self) -> bool:
        return not len(self.ids)


class Store:
    """Where the states of sessions are kept: here in memory, as long as the server lives."""

    def load(self) -> list[Session]:
        """Those that are there, the least recently used first."""
        return []

    def put(self, session: Session) -> Session:
        """Keep it, whole or not at all; return what stays in memory of it."""
        return session

    def state(self, session: Session) -> dict[str, Tensor]:
        """The state of its method; nobody changes it."""
        assert session.state is not None
        return session.state

    def drop(self, session: Session) -> None:
        """Forget it."""


def digest(before: str, messages: Sequence[Message]) -> list[str]:
    """Of a conversation of which `before` is the digest, that after each of these messages."""
    digests = []
    for message in messages:
        said = json.dumps([before, message.role, message.content])
        before = hashlib.sha256(said.encode()).hexdigest()
        digests.append(before)
    return digests


class Sessions:
    """All sessions; each answers one turn at a time. Safe to use from several threads."""

    def __init__(self, store: Store, max_sessions: int):
        self.store, self.max_sessions = store, max_sessions
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self._by_id: dict[str, Session] = {}  # the least recently used first
        found = store.load()
        if len(found) > max_sessions:
            raise UserError(
                f"--max-sessions must be at least {len(found)}, as many are kept already, got "
                f"{max_sessions}"
            )
        for session in found:
            self._add(session)

    def __len__(self) -> int:
        return len(self._by_id)

    def take(self, name: str | None, messages: Sequence[Message] = ()) -> Session:
        """A session for one turn: that of a name, else the nameless one that has said the most of
        the beginning of these messages; else a new one. `put` or `release` it.
        """
        said = digest("", messages)[-2::-1] if name is None else []
        with self._lock:
            idle = {x.said: x.id for x in self._idle() if x.id.startswith(NAMELESS)}
            found = (idle[one] for one in said if one in idle)
            name = name or next(found, NAMELESS + secrets.token_hex(16))
            if name in self._busy:
                raise RequestError(
                    f"session {name} is answering another turn: wait for it",
                    409,
                    param="session",
                    code="session_busy",
                )
            self._busy.add(name)
            return self._by_id.get(name, Session(name))

    def put(self, session: Session) -> None:
        """Keep a session after its turn, and drop the least recently used beyond the limit."""
        kept = self.store.put(session)
        with self._lock:
            self._busy.discard(session.id)
            self._add(kept)

    def release(self, session: Session) -> None:
        """Let it be as it was before its turn."""
        with self._lock:
            self._busy.discard(session.id)

    def _add(self, session: Session) -> None:
        self._by_id.pop(session.id, None)
        self._by_id[session.id] = session
        for old in self._idle()[: max(0, len(self._by_id) - self.max_sessions)]:
            self.store.drop(self._by_id.pop(old.id))

    def _idle(self) -> list[Session]:
        return [one for one in self._by_id.values() if one.id not in self._busy]
