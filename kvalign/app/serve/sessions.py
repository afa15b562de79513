"""Sessions: conversations whose caches are stored between requests, in memory or in a folder.

A session changes only when a turn's answer is complete. A client that disconnects, a failed row or
a killed server leaves it as it was before the turn.
"""

import hashlib
import json
import secrets
import threading
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.messages import Message
from kvalign.foundation.errors import UserError

_UNNAMED = "~"  # begins the id of a session that no request named
StateDict = dict[str, Tensor]
_MOST_DROPPED = 10_000  # names of dropped sessions that are remembered


@dataclass(frozen=True)
class Session:
    """One conversation."""

    id: str  # as requests name it
    messages_digest: str = ""  # a digest of its messages, answers included
    turn_digest: str = ""  # the same before the last answer
    request: str = ""  # a digest of the messages alone that brought the last answer
    fields: str = ""  # a digest of the other fields that change an answer
    answer: str = ""  # the last one
    finish: str = ""  # why that ended
    system: str | None = None  # what its first message told the model
    tools: str = ""  # a digest of the tools with which it begins; "" for none
    num_sinks: int = 0
    ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [T], all
    num_fed: int = 0  # tokens that its method has been fed
    num_new: int = 0  # tokens of the last answer
    turns: tuple[int, ...] = ()  # where in `ids` each begins
    state: StateDict | None = None  # after `num_fed`; None: of nothing, or its file has it
    checksum: str = ""  # of its file, if there is one
    number: int = 0  # of its file, higher in what was kept later

    @property
    def is_new(self) -> bool:
        return not len(self.ids)

    @property
    def is_named(self) -> bool:
        return not self.id.startswith(_UNNAMED)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of its state in memory."""
        return sum(x.nbytes for x in (self.state or {}).values())

    def reset(self) -> "Session":
        """Return the session before its first turn. Its next one is stored in place of this."""
        return Session(self.id, checksum=self.checksum, number=self.number)


class SessionStore:
    """Store of states: here in memory. `notes` say why files are ignored, a line each."""

    notes: Sequence[str] = ()

    def load(self) -> list[Session]:
        """The stored sessions, the least recently used first."""
        return []

    def check_new(self, name: str) -> None:
        """Raise RequestError if an unknown session's name already has a stored file."""

    def put(self, session: Session) -> Session:
        """Store it completely or not at all; return the part that stays in memory. RequestError if
        the stored version is not the one that this server wrote.
        """
        assert session.state is not None  # views of buffers, which have more room
        return replace(session, state={name: x.clone() for name, x in session.state.items()})

    def state(self, session: Session) -> StateDict:
        """The state of its method, which nobody changes. RequestError as of `put`."""
        assert session.state is not None
        return session.state

    def drop(self, name: str) -> bool:
        """Delete the session under a name; return whether there was one."""
        return False


def as_read(text: str) -> str:
    """Return a text as people compare it: NFC, LF at line ends, no whitespace at both ends."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return unicodedata.normalize("NFC", lines).strip()


def _num_alike(one: Tensor, other: Tensor) -> int:
    num = min(len(one), len(other))
    differ = (one[:num] != other[:num]).nonzero()
    return int(differ[0]) if len(differ) else num


def digest(before: str, messages: Sequence[Message]) -> list[str]:
    """Return digests of a conversation after each message, from the digest `before` them: of the
    tools, before the first. Those of messages that are alike `as_read` are equal.
    """
    digests = []
    for message in messages:
        about = [before, message.role, as_read(message.content), *message.calls]
        text = json.dumps(about, sort_keys=True)
        before = hashlib.sha256(text.encode()).hexdigest()
        digests.append(before)
    return digests


def _longest(there: Iterable[Session], messages: Sequence[Message], tools: str) -> Session | None:
    """The session that shares the longest beginning with messages; None if none does."""
    known = {one.messages_digest: one for one in there}
    beginnings = digest(tools, messages)[-2::-1]
    return next((known[one] for one in beginnings if one in known), None)


class Sessions:
    """All sessions; each answers one turn at a time. Safe to use from several threads.

    Named sessions are in `store`, at most `max_named`. Those without a name are in `unnamed`, at
    most `max_unnamed`. Neither kind displaces the other, but for room: of all states in memory,
    beyond `max_bytes`, those without a name go first.
    """

    def __init__(
        self,
        store: SessionStore,
        unnamed: SessionStore,
        max_named: int,
        max_unnamed: int,
        max_bytes: float,
    ):
        self.store, self._unnamed = store, unnamed
        self.max_named, self.max_unnamed, self.max_bytes = max_named, max_unnamed, max_bytes
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self._by_id: dict[str, Session] = {}  # the least recently used first
        self._dropped: dict[str, None] = {}  # names, those that went first in front
        sessions = store.load()
        for name, is_named in (("--max-sessions", True), ("--max-unnamed", False)):
            num, most = sum(one.is_named is is_named for one in sessions), self._most(is_named)
            if num > most:
                raise UserError(f"{name} must be at least {num}, as many are stored, got {most}")
        for session in sessions:
            self._add(session)

    def __len__(self) -> int:
        return len(self._by_id)

    def take(self, name: str | None, messages: Sequence[Message] = (), tools: str = "") -> Session:
        """The session for one turn: by name, else the unnamed one that shares the longest beginning
        with these messages and the digest of their tools, else a new one. `put` or `release` it.

        Raises:
            RequestError: it is answering another turn; it was dropped and these messages do not
                repeat it from the start; or its file is not the one that this server wrote.
        """
        has_answers = any(message.role == "assistant" for message in messages)
        with self._lock:
            if name is None:
                former = _longest(self._idle(is_named=False), messages, tools)
                name = former.id if former else _UNNAMED + secrets.token_hex(16)
            self._check_idle(name)
            if name in self._dropped and not has_answers:
                what = (
                    f"session {name} was dropped, since at most {self.max_named} are kept, and as "
                    f"many as memory has room for: send "
                    f"all its messages, or start it again after {_forget(name)}"
                )
                raise RequestError(what, 410, param="session", code="session_dropped")
            if name in self._by_id:
                self._by_id[name] = self._by_id.pop(name)  # the most recently used
            else:
                self.store.check_new(name)
            self._busy.add(name)
            return self._by_id.get(name, Session(name))

    def begun(self, messages: Sequence[Message], tools: str = "") -> Session | None:
        """The idle session of any name with the longest beginning of these messages; None: none."""
        with self._lock:
            there = [*self._idle(is_named=False), *self._idle(is_named=True)]
        return _longest(there, messages, tools)

    def most_alike(self, ids: Tensor, num_sinks: int) -> Session | None:
        """The idle unnamed session with these sinks and most tokens [T] in common; None: none."""
        with self._lock:
            there = self._idle(is_named=False)
        alike = [(_num_alike(x.ids, ids), x) for x in there if x.num_sinks == num_sinks]
        longest, session = max(alike, key=lambda pair: pair[0], default=(0, None))
        return session if longest > num_sinks else None

    def state(self, session: Session) -> StateDict:
        """Return the state of a session, from its `SessionStore`."""
        return self._store_of(session).state(session)

    def put(self, session: Session) -> None:
        """Store a session after its turn, and drop the least recently used beyond the limit."""
        record = self._store_of(session).put(session)
        with self._lock:
            self._busy.discard(session.id)
            self._add(record)

    def release(self, session: Session) -> None:
        """Leave it as it was before its turn."""
        with self._lock:
            self._busy.discard(session.id)

    def known(self, name: str) -> Session:
        """Session under a name as its last turn left it; RequestError if there is none."""
        with self._lock:
            if name not in self._by_id:
                raise _not_found(name)
            return self._by_id[name]

    def forget(self, name: str) -> None:
        """Delete a session; RequestError if it does not exist, or is answering a turn."""
        with self._lock:
            self._check_idle(name)
            is_known = name in self._by_id or name in self._dropped
            self._by_id.pop(name, None)
            self._dropped.pop(name, None)
            if not self.store.drop(name) and not is_known:
                raise _not_found(name)

    def _add(self, session: Session) -> None:
        self._by_id.pop(session.id, None)
        self._by_id[session.id] = session
        self._dropped.pop(session.id, None)
        num = sum(one.is_named is session.is_named for one in self._by_id.values())
        for old in self._idle(session.is_named)[: max(0, num - self._most(session.is_named))]:
            self._drop(old)
        num_bytes = sum(one.num_bytes for one in self._by_id.values())
        for old in (*self._idle(is_named=False), *self._idle(is_named=True)):
            if old.num_bytes and num_bytes > self.max_bytes:
                num_bytes -= old.num_bytes
                self._drop(old)
        while len(self._dropped) > _MOST_DROPPED:
            del self._dropped[next(iter(self._dropped))]

    def _drop(self, old: Session) -> None:
        self._store_of(old).drop(self._by_id.pop(old.id).id)
        if old.is_named:
            self._dropped[old.id] = None

    def _check_idle(self, name: str) -> None:
        if name in self._busy:
            what = f"session {name} is answering another turn: wait for it"
            raise RequestError(what, 409, param="session", code="session_busy")

    def _idle(self, is_named: bool) -> list[Session]:
        """Sessions that answer no turn, the least recently used first."""
        there = self._by_id.values()
        return [x for x in there if x.is_named is is_named and x.id not in self._busy]

    def _store_of(self, session: Session) -> SessionStore:
        return self.store if session.is_named else self._unnamed

    def _most(self, is_named: bool) -> int:
        return self.max_named if is_named else self.max_unnamed


def _not_found(name: str) -> RequestError:
    return RequestError(f"no such session: {name!r:.80}", 404, code="session_not_found")


def damaged(name: str) -> RequestError:
    """Return the error for a turn of a session whose file is not the one that this server wrote."""
    what = (
        f"the file of session {name} is damaged, or another program changed it: {_forget(name)} "
        "lets it start again"
    )
    return RequestError(what, 500, param="session", code="session_damaged")


def _forget(name: str) -> str:
    return f"DELETE /v1/sessions/{name}"
