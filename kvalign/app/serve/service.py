"""What a server does with a request: find its session, encode its prompt, put it to the engine."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvalign import stream_file
from kvalign.app.serve.engine import Engine, State, Turn
from kvalign.app.serve.errors import RequestError, failed
from kvalign.app.serve.folder import InFolder
from kvalign.app.serve.metrics import Metrics
from kvalign.app.serve.row import Row
from kvalign.app.serve.sessions import InMemory, Session, Sessions, digest, grown
from kvalign.app.serve.settings import ServeSettings
from kvalign.app.serve.wire import Chat, Completion, Message
from kvalign.errors import UserError
from kvalign.input_ids import encoded
from kvalign.methods import make_method
from kvalign.methods.base import Method
from kvalign.models import LoadedModel
from kvalign.sampling import Sampling
from kvalign.turns import messages_text, opening_len

MAX_NEW_TOKENS = 2048


@dataclass(frozen=True)
class Piece:
    """Text of an answer."""

    index: int
    text: str


@dataclass(frozen=True)
class End:
    """An answer is whole, and kept if it is a session's.

    Attributes:
        finish: `stop` or `length`.
    """

    index: int
    finish: str
    num_tokens: int


Event = Piece | End | RequestError
Put = Callable[[Event], None]


class Answers:
    """What a request waits for.

    Attributes:
        num: answers, each of which ends by an `End`; a `RequestError` ends all.
        num_prompt: tokens before the answers, those of the session included.
        num_cached: those that were not fed anew.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.num = self.num_prompt = self.num_cached = 0
        self.on_cancel: Callable[[], None] = lambda: None

    def cancel(self) -> None:
        """Nobody waits any more; what has ended stays."""
        for turn in self.turns:
            turn.is_cancelled = True
        self.on_cancel()


class Service:
    """One model, its sessions and its engine; `start` it, `stop` it.

    Raises:
        UserError: settings that do not fit the model, sessions of another.
    """

    def __init__(self, settings: ServeSettings, loaded: LoadedModel):
        self.settings, self.loaded, self.tokenizer = settings, loaded, loaded.tokenizer
        num_sinks = None if settings.num_sinks == "auto" else int(settings.num_sinks)
        says = Sampling.of_model(loaded.model.generation_config)
        said = {"top_k": 0, "stop_at_end": True, **says, **settings.sampling()}
        first = settings.stream(loaded, num_sinks=num_sinks, defaults=said)
        self.method, self.sampling = first.method, first.sampling
        if type(self.method).join is Method.join:
            raise UserError(f"{self.method.name} cannot be served: its rows cannot be put together")
        self.said, self.ends = said, first.end_ids
        self.most_tokens = settings.max_new_tokens or MAX_NEW_TOKENS
        self._methods = {self.method.sizes.num_sinks: self.method}
        self.metrics = Metrics()
        self.engine = Engine(settings.max_streams, settings.max_queue, self.metrics)
        self.sessions = Sessions(self._store(), settings.max_sessions)
        self._writer = ThreadPoolExecutor(1, "kvalign-sessions")

    def start(self) -> None:
        self.engine.start()

    def stop(self) -> None:
        """End all turns; sessions are as they were after their last whole ones."""
        self.engine.stop()
        self._writer.shutdown()

    def metrics_text(self) -> bytes:
        self.metrics.streams.set(self.engine.num_rows)
        self.metrics.waiting.set(self.engine.num_waiting)
        self.metrics.sessions.set(len(self.sessions))
        return self.metrics.text()

    def chat(self, asked: Chat, put: Put) -> Answers:
        """Answer messages; those that go on with a session are fed alone."""
        sampling, name = self._sampling(asked), asked.session
        if asked.num_choices > 1:
            self._refuse_session(name)
            session = self._begun(Session(""), asked.messages)
            ids = self._message_ids(session, asked.messages)
            return self._submit([(session, ids)], sampling, asked.num_choices, put)
        session = self.sessions.take(name, asked.messages)
        with _Releasing(self.sessions, session):
            rest = _rest(session, asked.messages)
            begun = self._begun(session, rest) if session.is_new else session
            ids = self._message_ids(begun, rest)
            return self._submit([(begun, ids)], sampling, 1, put, keep=(session, rest))

    def completion(self, asked: Completion, put: Put) -> Answers:
        """Continue texts; with a session, go on with its text."""
        sampling, name, prompts = self._sampling(asked), asked.session, asked.prompts
        if name is None or len(prompts) * asked.num_choices > 1:
            self._refuse_session(name)
            new = Session("", num_sinks=self.method.sizes.num_sinks)
            pairs = [(new, self._ids(prompt, special=True)) for prompt in prompts]
            return self._submit(pairs, sampling, asked.num_choices, put)
        session = self.sessions.take(name)
        with _Releasing(self.sessions, session):
            begun = session
            if session.is_new:
                begun = replace(session, num_sinks=self.method.sizes.num_sinks)
            ids = self._ids(prompts[0], special=session.is_new)
            said = [Message(role="user", content=str(prompts[0]))]
            return self._submit([(begun, ids)], sampling, 1, put, keep=(session, said))

    def _store(self) -> InMemory | InFolder:
        if self.settings.sessions is None:
            return InMemory()
        digests = (
            stream_file.tokenizer_digest(self.tokenizer),
            stream_file.aligner_digest(self.method),
        )
        return InFolder(self.settings.sessions, self._method_for, *digests, self.sampling)

    def _method_for(self, num_sinks: int) -> Method:
        """One that has been fed nothing."""
        if num_sinks not in self._methods:
            own, settings = self.method, self.settings
            self._methods[num_sinks] = make_method(
                own.name,
                own.model,
                cache_size=settings.cache_size,
                num_sinks=num_sinks,
                num_evicted=settings.num_evicted if "num_evicted" not in own.fixed else None,
                realign_every=settings.realign_every if own.takes_aligner else None,
                aligner=getattr(own, "aligner", None),
                warn=False,
            )
        return self._methods[num_sinks].new()

    def _sampling(self, asked: Chat | Completion) -> Sampling:
        most = asked.most_tokens or self.most_tokens
        if most > self.most_tokens:
            raise RequestError(
                f"max_tokens must be at most {self.most_tokens} here, got {most}",
                param="max_tokens",
            )
        if asked.num_choices > self.settings.max_streams:
            raise RequestError(f"n must be at most {self.settings.max_streams} here", param="n")
        drawn = {"temperature": asked.temperature, "top_p": asked.top_p}
        given = {name: value for name, value in drawn.items() if value is not None}
        if given:
            given["do_sample"] = True
        if asked.seed is not None:
            given["seed"] = asked.seed % 2**62
        always: dict[str, Any] = {"max_new_tokens": most}
        if asked.stops:
            always["stop_strings"] = asked.stops
        return Sampling(**{**self.said, **given, **always})

    def _refuse_session(self, name: str | None) -> None:
        if name is not None:
            raise RequestError("a session has one prompt and one answer: n=1", param="session")

    def _begun(self, session: Session, messages: Sequence[Message]) -> Session:
        """A new session with its system prompt, which stays in the cache as sinks."""
        system = messages[0].content if messages[0].role == "system" else None
        num_sinks = self.method.sizes.num_sinks
        if (
            system is not None
            and self.settings.num_sinks == "auto"
            and "num_sinks" not in self.method.fixed
        ):
            num_sinks = opening_len(self.tokenizer, system)
            if num_sinks >= self.settings.cache_size:
                raise RequestError(
                    f"the system message takes {num_sinks} entries of a cache of "
                    f"{self.settings.cache_size}: shorten it, or serve with a larger --cache-size",
                    param="messages",
                    code="system_too_long",
                )
        return replace(session, system=system, num_sinks=num_sinks)

    def _message_ids(self, session: Session, messages: Sequence[Message]) -> Tensor:
        said = [message.model_dump() for message in messages]
        text = messages_text(self.tokenizer, said, goes_on=not session.is_new)
        special = session.is_new and not self.tokenizer.chat_template
        return self._ids(text, special=special)

    def _ids(self, prompt: str | list[int], *, special: bool) -> Tensor:
        try:
            ids = encoded(prompt, self.tokenizer, self.loaded.model, special=special)
        except (UnicodeEncodeError, TypeError):  # half of a surrogate pair
            raise RequestError("the prompt is no Unicode text", param="prompt") from None
        if not ids:
            raise RequestError("the prompt is empty: give at least one word", param="prompt")
        most = self.settings.max_prompt_tokens
        if len(ids) > most:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, a request may bring {most}: send it in parts",
                param="prompt",
                code="prompt_too_long",
            )
        return torch.tensor(ids, dtype=torch.int64)

    def _submit(
        self,
        pairs: Sequence[tuple[Session, Tensor]],
        sampling: Sampling,
        num_choices: int,
        put: Put,
        keep: tuple[Session, Sequence[Message]] | None = None,
    ) -> Answers:
        """Put turns to the engine: of each session, what is fed to it and `num_choices` answers."""
        answers = Answers()
        answers.num = len(pairs) * num_choices
        held = _Held(self, *keep, put) if keep else None
        for number, (session, new) in enumerate(pairs):
            before = session.ids
            if len(before) and int(before[-1]) in self.ends:
                before = before[:-1]  # it has not been fed, and the session goes on
            ids = torch.cat([before, new])
            rows = [
                Row(
                    sampling,
                    number * num_choices + draw,
                    ids,
                    self.tokenizer,
                    self.ends,
                    self.loaded.model.device,
                    lambda index, text: put(Piece(index, text)),
                    draw,
                )
                for draw in range(num_choices)
            ]
            if held:
                held.session, held.ids = session, ids
            turn = Turn(
                self._method_for(session.num_sinks),
                None if session.is_new else self.sessions.store.state(session),
                ids[session.num_fed :],
                rows,
                ended=held.ended if held else lambda row, _: put(_end(row)),
                failed=held.failed if held else put,
                keeps=held is not None,
            )
            answers.turns.append(turn)
            answers.num_prompt += len(ids)
            answers.num_cached += session.num_fed
        if held:
            answers.on_cancel = held.cancelled
        self.engine.submit(answers.turns)
        return answers


class _Held:
    """The session of a turn: kept when its answer is whole, else left as it was; whichever comes
    first.
    """

    def __init__(self, service: Service, before: Session, said: Sequence[Message], put: Put):
        self.service, self.before, self.said, self.put = service, before, said, put
        self.session, self.ids = before, before.ids
        self._lock, self._is_done = threading.Lock(), False

    def ended(self, row: Row, state: State | None) -> None:
        if self._is_first():
            assert state is not None
            self.service._writer.submit(self._keep, row, state)

    def failed(self, error: RequestError) -> None:
        if self._is_first():
            self.service.sessions.release(self.before)
            self.put(error)

    def cancelled(self) -> None:
        if self._is_first():
            self.service.sessions.release(self.before)

    def _keep(self, row: Row, state: State) -> None:
        answer = Message(role="assistant", content=row.text)
        said = digest(self.before.said, [*self.said, answer])[-1]
        try:
            self.service.sessions.put(grown(self.session, self.ids, row.token_ids, said, state))
        except Exception as error:
            self.service.sessions.release(self.before)
            self.put(failed(f"this answer is not kept: {error}", "not_kept"))
        else:
            self.put(_end(row))

    def _is_first(self) -> bool:
        with self._lock:
            is_first, self._is_done = not self._is_done, True
            return is_first


class _Releasing:
    """Release a session if its turn cannot begin."""

    def __init__(self, sessions: Sessions, session: Session):
        self.sessions, self.session = sessions, session

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None:
            self.sessions.release(self.session)


def _rest(session: Session, messages: Sequence[Message]) -> Sequence[Message]:
    """Those that the session has not heard."""
    if session.is_new:
        return messages
    digests = digest("", messages)
    if session.said in digests[:-1]:
        return messages[digests.index(session.said) + 1 :]
    system = messages[0].content if messages[0].role == "system" else None
    turns = messages[1:] if system is not None else messages
    if len(turns) == 1 and system in (None, session.system):
        return turns
    raise RequestError(
        "these messages do not go on with what session has said: send the new turn alone, all "
        "messages as they were answered, or name another session",
        param="session",
        code="session_mismatch",
    )


def _end(row: Row) -> End:
    return End(row.index, row.finish, len(row.token_ids))
