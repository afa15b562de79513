"""Sessions in a folder, a file each, which `load_stream` and `kvalign chat --state` read, too."""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from kvalign.app.serve.sessions import Session, SessionStore, damaged
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.methods.base import Method
from kvalign.streaming import stream_file
from kvalign.streaming.chat import SYSTEM
from kvalign.streaming.sampling import Sampling
from kvalign.streaming.stream_file import Digests

log = logging.getLogger(__name__)
_ID, _TURNS, _OF, _NUMBER = "session", "turns", "of_tokens", "number"
_NOTES = ("messages_digest", "turn_digest", "request", "fields", "answer", "tools", "finish")
"""Fields of a session that are notes of its file."""
_SUFFIX = ".safetensors"


class DamagedError(UserError):
    """File of the folder that differs from what a server wrote."""


@dataclass
class InFolder(SessionStore):
    """Store of files in a folder that no other server writes to. The sessions' tokens are in
    memory, their caches are not. `method_for` makes an empty method with so many sinks.

    The checksum of a file, over tokens and cache, identifies the session. A changed file is neither
    read nor overwritten.

    Attributes:
        notes: why files in the folder are ignored, a line each.
        last: the highest number of a file. Clocks that were changed may not tell which file is
            newer.
    """

    folder: Path
    method_for: Callable[[int], Method]
    digests: Digests
    sampling: Sampling
    has_unnamed: bool = False  # whether sessions that no request named are taken up
    notes: list[str] = field(default_factory=list)
    last: int = 0

    def load(self) -> list[Session]:
        """All sessions of the folder; UserError for a file of another model, method or size."""
        paths = [path for path in self.folder.glob(f"*{_SUFFIX}") if path.name[0] != "."]
        sessions, num_unnamed = [], 0
        for path in paths:
            try:
                session = self._read(path)
            except DamagedError as error:
                self.notes.append(str(error))
                continue
            if session.is_named or self.has_unnamed:
                sessions.append(session)
            else:
                num_unnamed += 1
        sessions.sort(key=lambda session: session.number)
        self.last = sessions[-1].number if sessions else 0
        if num_unnamed:
            several = "s" * (num_unnamed > 1)
            self.notes.append(
                f"{num_unnamed} conversation{several} of requests without a session in "
                f"{self.folder}: --keep-unnamed continues them"
            )
        return sessions

    def check_new(self, name: str) -> None:
        if self._path(name).exists():
            raise damaged(name)

    def put(self, session: Session) -> Session:
        assert session.state is not None
        path = self._path(session.id)
        if stream_file.checksum_of(path) != session.checksum:
            raise damaged(session.id)
        self.last += 1
        notes = {name: getattr(session, name) for name in _NOTES}
        notes |= {_ID: session.id, _TURNS: ",".join(map(str, session.turns))}
        notes |= {_OF: _digest(session.ids), _NUMBER: str(self.last)}
        if session.system is not None:
            notes[SYSTEM] = session.system
        checksum = stream_file.save(
            path,
            self.method_for(session.num_sinks),
            self.digests,
            self.sampling,
            ids=session.ids,
            num_fed=session.num_fed,
            num_new=session.num_new,
            state=session.state,
            generator=torch.Generator(),
            notes=notes,
        )
        return replace(session, state=None, checksum=checksum)

    def state(self, session: Session) -> dict[str, Tensor]:
        path = self._path(session.id)
        try:
            _, tensors = stream_file.read(path)
            # Afterwards: a session that another one is made from may be written meanwhile.
            if stream_file.checksum_of(path) != session.checksum:
                raise UserError(f"{path} was changed by another program")
        except UserError as error:
            log.error("a session cannot continue: %s", error)
            raise damaged(session.id) from None
        return stream_file.state_of(tensors)

    def drop(self, name: str) -> bool:
        path = self._path(name)
        is_there = path.exists()
        stream_file.remove(path)
        return is_there

    def _path(self, name: str) -> Path:
        """Name that no request can choose."""
        return self.folder / (hashlib.sha256(name.encode()).hexdigest()[:32] + _SUFFIX)

    def _read(self, path: Path) -> Session:
        """The session in a file, without its state; UserError for another model, method or size."""
        checksum = stream_file.checksum_of(path)
        try:
            saved, tensors = stream_file.read(path)
        except UserError as error:
            raise DamagedError(str(error)) from None
        method = self.method_for(saved.num_sinks)
        other = "name another --sessions, or use the former settings"
        if (
            saved.method != method.name
            or CacheSizes(**saved.sizes(method.spec.family)) != method.sizes
            or saved.aligner != self.digests.aligner
        ):
            raise UserError(f"{path} is a session of another method or size: {other}")
        try:
            saved.check_model(method.model)
        except UserError as error:
            raise UserError(f"{path} is a session of another model ({error}): {other}") from None
        if saved.tokenizer != self.digests.tokenizer or _ID not in saved.notes:
            raise UserError(f"{path} is not a session of this model: {other}")
        if path != self._path(saved.notes[_ID]):
            raise DamagedError(f"{path} is a copy: it has the session of another file")
        try:
            of = _digest(tensors["ids"])
            turns = tuple(int(x) for x in saved.notes[_TURNS].split(",") if x)
            number = int(saved.notes[_NUMBER])
            stream_file.check_fits(saved, tensors, method.model)
            method.restore(stream_file.state_of(tensors))
        except (KeyError, ValueError) as error:
            raise DamagedError(f"cannot continue the session in {path}: {error}") from None
        if saved.notes.get(_OF) != of:
            raise DamagedError(f"{path} was changed by another program than kvalign serve")
        return Session(
            id=saved.notes[_ID],
            state=None,
            **{name: saved.notes[name] for name in _NOTES},
            system=saved.notes.get(SYSTEM),
            num_sinks=saved.num_sinks,
            ids=tensors["ids"],
            num_fed=saved.num_fed,
            num_new=saved.num_new,
            turns=turns,
            checksum=checksum,
            number=number,
        )


def _digest(ids: Tensor) -> str:
    return hashlib.sha256(ids.contiguous().numpy().data).hexdigest()
