"""Handling of a request: find its session, encode its prompt, pass it to the engine."""

import logging
import math
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvalign.app.serve.cache_view import Place
from kvalign.app.serve.engine import Engine, Metrics
from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.folder import InFolder
from kvalign.app.serve.forms import Constraints, ToolSet
from kvalign.app.serve.messages import Message, unsupported
from kvalign.app.serve.prompts import RUN, Change, Edits, Prompts, new_messages, session_for
from kvalign.app.serve.reading import Reading
from kvalign.app.serve.responses import ResponseRequest
from kvalign.app.serve.sessions import Session, Sessions, SessionStore, StateDict, digest
from kvalign.app.serve.settings import ServeSettings
from kvalign.app.serve.turn import (
    AnswerPiece,
    AnswerRow,
    Answers,
    End,
    Put,
    Rules,
    SessionUpdate,
    Turn,
)
from kvalign.app.serve.wire import OF_REQUESTS, ChatRequest, Completion, Request
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.foundation.machine import free_bytes
from kvalign.methods import make_method
from kvalign.methods.base import Method
from kvalign.models.loading import LoadedModel
from kvalign.streaming.answer import token_bytes
from kvalign.streaming.chat import SHARE, talk_defaults
from kvalign.streaming.sampling import DRAWS, Sampling
from kvalign.streaming.stream_file import Digests
from kvalign.streaming.turns import end_ids

log = logging.getLogger(__name__)
MAX_NEW_TOKENS = 2048
_MOST_BLANK = 8  # methods that are kept ready, one for each length of a system prompt


class Service:
    """One model, its sessions and its engine, or that of another service of the model; UserError if
    settings or sessions do not fit.
    """

    def __init__(self, settings: ServeSettings, loaded: LoadedModel, engine: Engine | None = None):
        settings, self.tokenizer = settings.as_kept(), loaded.tokenizer
        num_sinks = settings.sinks()
        self.defaults = {**talk_defaults(loaded.model), **settings.sampling()}
        how: dict[str, Any] = dict(num_streams=settings.max_streams, is_edited=settings.edit)
        first = settings.stream(loaded, num_sinks=num_sinks, defaults=self.defaults, **how)
        self.method, self.sampling, self.ends = first.method, first.sampling, first.end_ids
        self.settings = replace(settings, memory=self.method.sizes.memory)
        self.json_ends = end_ids(loaded.model, self.tokenizer)
        self.constraints = Constraints(self.tokenizer, self.json_ends)
        if type(self.method).join is Method.join:
            raise UserError(f"{self.method.name} cannot be served: its rows cannot be joined")
        if (num := self.method.tokens_left) is not None:
            raise UserError(f"with --positions keep streams end after {num} tokens: leave it out")
        if settings.edit:
            self.method.edit(0, 0)  # refuses a method that cannot be edited
        if settings.compile:
            self._take_stored_steps()
        self.most_tokens = settings.max_new_tokens or MAX_NEW_TOKENS
        keeps_opening = num_sinks is None and "num_sinks" not in self.method.fixed
        self.prompts = Prompts(self.tokenizer, self.method, settings, keeps_opening)
        self.spelled = lru_cache(2**16)(self._spelled)
        self._blank = lru_cache(_MOST_BLANK)(self._make_blank)
        self.metrics = engine.metrics if engine else Metrics()
        self.engine = engine or Engine(settings.max_streams, settings.max_queue, self.metrics)
        store = SessionStore()
        if settings.sessions is not None:
            of = Digests.of(self.method, self.tokenizer), self.sampling, settings.keep_unnamed
            store = InFolder(settings.sessions, self._method_for, *of)
        unnamed = store if settings.keep_unnamed else SessionStore()
        most = settings.max_sessions, settings.max_unnamed, SHARE * (free_bytes() or math.inf)
        self.sessions = Sessions(store, unnamed, *most)
        if engine is None:
            self.metrics.streams.set_function(lambda: self.engine.num_rows)
            self.metrics.waiting.set_function(lambda: self.engine.num_waiting)
            self.metrics.sessions.set_function(lambda: len(self.sessions))
        self._answering = WeakValueDictionary[str, Turn]()
        self._writer = ThreadPoolExecutor(1, "kvalign-sessions")

    def place_of(self, session: Session, sizes: CacheSizes, num_tokens: int) -> Place:
        """Place of a session's stream, of these sizes, in a conversation of so many tokens."""
        num_gone = self.prompts.num_gone(session)
        opening = self.prompts.opening_len(session) if num_gone else 0
        return Place(sizes, opening, num_gone, num_tokens - num_gone)

    def _spelled(self, token: int) -> str:
        """Text of a token alone."""
        return token_bytes(self.tokenizer, token).decode(errors="replace")

    def _take_stored_steps(self) -> None:
        """Load stored steps. To compile others would take a minute for each number of rows."""
        method, stepper = self.method, self.method.stepper
        for num_rows, name in ((1, "steps"), (2, "steps of several sessions")):
            if stepper is None or not stepper.prepare(method, num_rows):
                log.warning("%s are not compiled: those of %s are not stored", name, method.title)
                if num_rows == 1:
                    method.stepper = None
                    method.take_ready_stepper()
                return

    def start(self) -> None:
        self.engine.start()

    def stop(self) -> None:
        """Stop all turns; sessions stay as they were after their last complete ones."""
        self.engine.stop()
        self._writer.shutdown()

    def chat(self, request: ChatRequest, put: Put) -> Answers:
        """Answer messages. Of messages that continue a session only the new ones are fed.

        A response is in a session of its own or that of an earlier one. One that sends all messages
        takes up the state of the session that had them, which stays.
        """
        prompts, tools = self.prompts, ToolSet.of(request, self.tokenizer)
        reading = prompts.reading(request, tools)
        request.messages = [reading.taken_apart(message) for message in request.messages]
        previous, begun = None, None
        if isinstance(request, ResponseRequest):
            if reading.thoughts and request.num_top is not None:
                raise unsupported("logprobs of a model that thinks", "top_logprobs")
            previous = request.previous
            if previous is None:
                begun = self.sessions.begun(request.messages, request.opening)
        sampling, name = self._sampling(request), request.session
        if request.num_choices > 1:
            if name is not None:
                what = "a session has one prompt and one answer: n=1"
                raise RequestError(what, param="session")
            new = prompts.new_session(Session(""), request, tools)
            ids = prompts.of_messages(new, request.messages, request, tools)
            return self._submit([(new, ids)], sampling, request, put, reading, tools)
        with self._session(name, request.messages, request.opening) as former:
            if request.continue_final_message:
                pair = _cut(former, request, reading), torch.empty(0, dtype=torch.int64)
                return self._submit([pair], sampling, request, put, reading, None, [])
            session: Session | None = former
            if former.is_new or previous != len(former.ids) - former.num_new:
                session = session_for(former, request)
                if session is not None and previous is not None:
                    what = "only the last response that a server keeps of a conversation goes on"
                    code = "previous_response_not_found"
                    raise RequestError(what, param="previous_response_id", code=code)
            if session is None:
                return self._again(former, put, reading)
            start = None
            if session.is_new and begun and (state := self._state(begun)) is not None:
                session = replace(begun, id=session.id, state=None, checksum="", number=0)
                start = state, Edits([], session.num_fed, session.num_fed)
            try:
                messages = new_messages(session, request, self._last_calls(former, reading))
            except RequestError as error:
                if not self.settings.edit or error.param != "session":
                    raise
                session, messages = session.reset(), request.messages
            if session.is_new:
                session = prompts.new_session(session, request, tools)
            of_request = digest(session.tools, request.messages)[-1]
            session = replace(session, request=of_request, fields=request.fields)
            ids = prompts.of_messages(session, messages, request, tools)
            if self.settings.edit and session.is_new:
                start = self._edited(session, ids, former)
            of = reading, tools, messages, start
            return self._submit([(session, ids)], sampling, request, put, *of)

    def end_answer(self, name: str) -> None:
        """End the answer that a session is writing after its next token: it counts as one that was
        cut by `max_tokens`. RequestError if it writes none.
        """
        turn = self._answering.get(name)
        if turn is None:
            what = f"session {name:.80} is writing no answer"
            raise RequestError(what, 409, param="session", code="session_idle")
        turn.is_cut = True

    def completion(self, request: Completion, put: Put) -> Answers:
        """Continue texts."""
        sampling, texts = self._sampling(request), request.prompts
        if len(texts) * request.num_choices > (most := self.settings.max_streams):
            raise RequestError(f"the most answers of a request are {most}", param="prompt")
        new = Session("", num_sinks=self.method.sizes.num_sinks)
        pairs = [(new, self.prompts.of(text)) for text in texts]
        return self._submit(pairs, sampling, request, put)

    @contextmanager
    def _session(
        self, name: str | None, messages: Sequence[Message], tools: str
    ) -> Iterator[Session]:
        """Session for a turn, released if that cannot begin."""
        session = self.sessions.take(name, messages, tools)
        try:
            yield session
        except BaseException:
            self.sessions.release(session)
            raise

    def _edited(
        self, session: Session, ids: Tensor, former: Session
    ) -> tuple[StateDict, Edits] | None:
        """The state of the conversation that a new one with these tokens is an edit of, the former
        one of its name or the unnamed one most like it, and the edits; None if there is none from
        which nothing has been evicted, or if its state is not there any more.
        """
        other = former if former.is_named else self.sessions.most_alike(ids, session.num_sinks)
        if other is None or other.is_new or other.num_sinks != session.num_sinks:
            return None
        if self.method.sizes.num_dropped(other.num_fed):
            return None
        held, exactly = other.ids[: other.num_fed].tolist(), self.settings.exactly
        edits = Edits.between(held, ids.tolist(), exactly)
        state = self._state(other) if edits.num_kept > RUN else None
        return None if state is None else (state, edits)

    def _state(self, other: Session) -> StateDict | None:
        """The state of a session to begin from; None if it went on, was dropped, or is damaged."""
        try:
            return self.sessions.state(other)
        except RequestError:
            return None

    def _last_calls(self, session: Session, reading: Reading) -> list[tuple[str | None, str]]:
        reading = self._placed(reading, session, session.ids[: len(session.ids) - session.num_new])
        calls = reading.calls(reading.whole(session.answer).calls)
        return [(call["id"], call["function"]["name"]) for call in calls]

    def _placed(self, reading: Reading, session: Session, before: Tensor) -> Reading:
        """Rules for an answer to these tokens [T]."""
        return replace(
            reading,
            is_thinking=reading.is_begun(self.tokenizer, before),
            place=f"{session.id or secrets.token_hex(12)} {len(before)}",
        )

    def _goes_on(self, session: Session) -> Tensor:
        """The tokens [T] of a session that goes on: without an end, which has not been fed."""
        ids = session.ids
        return ids[:-1] if len(ids) and int(ids[-1]) in self.ends else ids

    def _again(self, session: Session, put: Put, reading: Reading) -> Answers:
        num_before = len(session.ids) - session.num_new
        reading = self._placed(reading, session, session.ids[:num_before])
        answers = Answers(1, reading, num_cached=num_before)
        method, num_gone = self._method_for(session.num_sinks), self.prompts.num_gone(session)
        answers.count(method, num_before - num_gone, num_gone)
        self.sessions.release(session)
        put(AnswerPiece(0, session.answer))
        dropped = method.sizes.num_dropped
        num_evicted = dropped(session.num_fed - num_gone) - dropped(num_before - num_gone)
        num_thoughts = reading.num_thoughts(self.tokenizer, session.ids[num_before:].tolist())
        put(End(0, session.finish, session.num_new, num_evicted, num_thoughts))
        return answers

    def _method_for(self, num_sinks: int) -> Method:
        """Method that has been fed nothing."""
        is_own = num_sinks == self.method.sizes.num_sinks
        return (self.method if is_own else self._blank(num_sinks)).new()

    def _make_blank(self, num_sinks: int) -> Method:
        """Return the template for methods with this number of sinks."""
        method, settings = self.method, self.settings
        sizes = settings.sizes().items()
        own_sizes = {name: size for name, size in sizes if name not in method.ignored_settings()}
        own_sizes |= {"cache_size": method.sizes.cache_size, "num_sinks": num_sinks}
        aligner = getattr(method, "aligner", None)
        blank = make_method(method.name, method.model, aligner=aligner, warn=False, **own_sizes)
        blank.stepper = method.stepper
        blank.reset()
        return blank

    def _sampling(self, request: ChatRequest | Completion) -> Sampling:
        most = min(request.most_tokens or self.most_tokens, self.most_tokens)
        if request.num_choices > self.settings.max_streams:
            raise RequestError(f"n must be at most {self.settings.max_streams} here", param="n")
        values = {name: getattr(request, name) for name in OF_REQUESTS}
        sampling: dict[str, Any] = {name: x for name, x in values.items() if x is not None}
        if sampling.keys() & set(DRAWS):
            sampling["do_sample"] = True
        if request.seed is not None:
            sampling["seed"] = request.seed % 2**62
        if request.stops:
            sampling["stop_strings"] = request.stops
        return Sampling(**{**self.defaults, **sampling, "max_new_tokens": most})

    def _submit(
        self,
        pairs: Sequence[tuple[Session, Tensor]],
        sampling: Sampling,
        request: Request,
        put: Put,
        reading: Reading | None = None,
        tools: ToolSet | None = None,
        messages: Sequence[Message] | None = None,
        start: tuple[StateDict, Edits] | None = None,
    ) -> Answers:
        """Pass turns to the engine: for each session, its input and the answers.

        `messages` are the new messages of a session that is stored with its answer; `start` is a
        state that a new session takes up, with edits that make it its own.
        """
        num_choices, schema = request.num_choices, request.schema_of_answer
        constraint, ends = None, self.ends
        session, new = pairs[0]
        before = torch.cat([self._goes_on(session), new])
        reading = self._placed(reading or Reading(), session, before)
        # A form begins where a thought that the prompt has begun ends.
        opens = reading.is_thinking and reading.thoughts
        before_form = f"{opens[1]}\n\n" if opens else ""
        if tools and tools.must:
            constraint = self.constraints.of(tools, "tool_choice", before_form)
        elif tools and tools.strict:
            constraint = self.constraints.of(tools, "tools")
        elif schema is not None:
            constraint = self.constraints.of(schema, "response_format", before_form)
        if constraint is not None:
            ends = self.json_ends
            sampling = replace(sampling, no_repeat_ngram_size=0)  # JSON repeats itself
        rules = Rules(sampling, self.tokenizer, ends, put, request.num_top, constraint, reading)
        answers = Answers(len(pairs) * num_choices, reading)
        for number, (session, new) in enumerate(pairs):
            before = self._goes_on(session)
            assert sampling.max_new_tokens is not None
            ids, num_cached = torch.cat([before, new]), session.num_fed
            text = None
            if len(new):
                of_turn = before, new, sampling.max_new_tokens
                session, text = self.prompts.whole_turns(session, *of_turn)
            update = (
                SessionUpdate(self.sessions, messages, session, ids, self._writer, put)
                if messages is not None
                else None
            )
            method = self._method_for(session.num_sinks)
            place = self.place_of(session, method.sizes, len(ids))
            num_gone = place.num_gone
            answers.count(method, len(ids) - num_gone, num_gone)
            if text is not None:
                ids, num_cached, start = text, 0, None
                answers.num_reencoded += max(0, len(text) - len(new))
            numbers = range(number * num_choices, (number + 1) * num_choices)
            rows = [AnswerRow(rules, x, draw, ids, method) for draw, x in enumerate(numbers)]
            if request.stream_options and request.stream_options.include_cache:
                for row in rows:
                    row.place = place
            state, changes = None, list[Change]()
            if start is None:
                state = self.sessions.state(session) if num_cached else None
            else:
                state, edits = start
                num_cached, changes = edits.num_held, edits.changes
                answers.num_edited += edits.num_new
                answers.num_cached -= edits.num_new
            turn = Turn(method, state, ids[num_cached:], rows, put, update, [*changes])
            answers.turns.append(turn)
            if update is not None:
                self._answering[session.id] = turn
            answers.num_cached += num_cached
        self.engine.submit(answers.turns)
        return answers


def _cut(session: Session, request: ChatRequest, reading: Reading) -> Session:
    """A session whose last answer was cut, as it was before that answer, which it goes on with;
    RequestError for another one, or other messages.
    """
    what = ""
    if reading.thoughts is not None:
        what = "it is not supported for models that think"
    elif session.is_new or digest(session.tools, request.messages)[-1] != session.messages_digest:
        what = "send all messages of the session, with its answers unchanged"
    elif session.finish != "length":
        what = "the last answer has ended by itself"
    if what:
        raise RequestError(f"continue_final_message: {what}", param="continue_final_message")
    return replace(session, messages_digest=session.turn_digest, request="", fields=request.fields)
