"""Sessions in a folder: a stream's file each, written whole; `kvalign.load_stream` and `kvalign
chat --state` read them, too.
"""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kvalign.aligners.base import embedding_fingerprint
from kvalign.app.serve.sessions import Session, Store
from kvalign.app.serve.turn import free
from kvalign.app.sessions.conversation import SYSTEM
from kvalign.foundation.errors import UserError
from kvalign.methods.base import Method
from kvalign.streaming import stream_file
from kvalign.streaming.sampling import Sampling
from kvalign.streaming.stream_file import SavedStream
from kvalign.streaming.text_stream import STATE

_ID, _TURNS = "session", "turns"
_WORDS = ("said", "asked", "answer", "finish")
_SUFFIX = ".safetensors"


@dataclass
class InFolder(Store):
    """A store of files in a folder that no other server writes to; in memory are the sessions'
    tokens, not their caches. `method_for` makes a method of so many sinks that has been fed
    nothing.
    """

    folder: Path
    method_for: Callable[[int], Method]
    tokenizer_digest: str
    aligner_digest: str | None
    sampling: Sampling

    def load(self) -> list[Session]:
        """All sessions of the folder; UserError for a file of another model, method or size."""
        paths = sorted(self.folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime)
        return [replace(self._read(path), state=None) for path in paths if path.name[0] != "."]

    def put(self, session: Session) -> Session:
        assert session.state is not None
        method = self.method_for(session.num_sinks)
        model = method.model
        notes = {_ID: session.id, _TURNS: ",".join(map(str, session.turns))}
        notes |= {name: getattr(session, name) for name in _WORDS}
        if session.system is not None:
            notes[SYSTEM] = session.system
        saved = SavedStream(
            method=method.name,
            **asdict(method.sizes),
            aligner=self.aligner_digest,
            base_model=method.spec.name,
            embedding_fingerprint=list(embedding_fingerprint(model)),
            sampling=asdict(self.sampling),
            device=model.device.type,
            num_fed=session.num_fed,
            num_new=session.num_new,
            tokenizer=self.tokenizer_digest,
            notes=notes,
        )
        tensors = {STATE + name: x.cpu().contiguous() for name, x in session.state.items()}
        tensors["ids"] = session.ids
        tensors["generator"] = torch.Generator().get_state()
        stream_file.write(self._path(session), saved, tensors)
        return replace(session, state=None)

    def state(self, session: Session) -> dict[str, Tensor]:
        state = self._read(self._path(session)).state
        assert state is not None
        return state

    def drop(self, session: Session) -> None:
        self._path(session).unlink(missing_ok=True)

    def _path(self, session: Session) -> Path:
        """A name that no request chooses."""
        return self.folder / (hashlib.sha256(session.id.encode()).hexdigest()[:32] + _SUFFIX)

    def _read(self, path: Path) -> Session:
        saved, tensors = stream_file.read(path)
        method = self.method_for(saved.num_sinks)
        own = {"method": method.name, **asdict(method.sizes)}
        other = "name another --sessions, or serve as those there were served"
        if (
            any(getattr(saved, name) != value for name, value in own.items())
            or saved.aligner != self.aligner_digest
        ):
            raise UserError(f"{path} is a session of another method or size: {other}")
        if saved.tokenizer != self.tokenizer_digest or _ID not in saved.notes:
            raise UserError(f"{path} is no session of this model: {other}")
        try:
            stream_file.check_fits(saved, tensors, method.model)
            state = {k.removeprefix(STATE): x for k, x in tensors.items() if k.startswith(STATE)}
            device = method.model.device
            state = {name: x.to(device) for name, x in state.items()}
            method.restore(state)
            free(method)
        except (KeyError, UserError) as error:
            raise UserError(f"cannot go on with the session in {path}: {error}; {other}") from None
        return Session(
            id=saved.notes[_ID],
            **{name: saved.notes.get(name, "") for name in _WORDS},
            system=saved.notes.get(SYSTEM),
            num_sinks=saved.num_sinks,
            ids=tensors["ids"],
            num_fed=saved.num_fed,
            num_new=saved.num_new,
            turns=tuple(int(x) for x in saved.notes.get(_TURNS, "").split(",") if x),
            state=state,
        )
