"""Replies to a client: the engine's events in the forms of OpenAI's API, as one JSON document or as
Server-Sent Events.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvalign.app.serve.answers import Answers, End, Event, Piece
from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.tools import Call, CallReader, Tools, as_json
from kvalign.app.serve.turn import TokenLogprob

WARNING, IGNORED = "X-KVAlign-Warning", "X-KVAlign-Ignored"
_DISCONNECT = "gone"
_LONGEST_NAME = 80
Events = asyncio.Queue[Any]


class TextForm:
    """Answers of /v1/completions."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"
    opening: ClassVar[dict[str, Any]] = {}  # what a choice says in a chunk before its text
    of_end: ClassVar[dict[str, Any]] = {"text": ""}  # and in its last one

    def __init__(self, model: str):
        self.model, self.id = model, self.prefix + secrets.token_hex(12)
        self.created = int(time.time())

    def for_request(self, request: Any, answers: Answers) -> None:
        """Take what the form says of a request whose answers begin."""

    def of_text(self, text: str) -> dict[str, Any]:
        """Return a choice's fields for a whole text."""
        return {"text": text}

    def of_piece(self, index: int, text: str) -> dict[str, Any]:
        """Return a choice's fields for a piece, in a chunk."""
        return {"text": text}

    def of_rest(self, index: int) -> dict[str, Any] | None:
        """Return those of what was held back of a choice, as it ends; None for nothing."""
        return None

    def finish_of(self, index: int, finish: str) -> str:
        """Return the reason for a choice's end, which has been said in pieces."""
        return finish

    def of_tokens(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Return the logprobs of tokens; None without one."""
        if not tokens:
            return None
        tops = [{_text(spelled): value for spelled, value in one.top} for one in tokens]
        return {
            "tokens": [one.text for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [one.offset for one in tokens],
        }

    def document(self, kind: str, choices: list[dict], **usage: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **usage}


class ChatForm(TextForm):
    """Answers of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    opening: ClassVar[dict[str, Any]] = {"delta": {"role": "assistant", "content": ""}}
    of_end: ClassVar[dict[str, Any]] = {"delta": {}}

    _readers: Sequence[CallReader | None] = ()  # of choices in pieces
    _tools: Tools | None = None

    def for_request(self, request: Any, answers: Answers) -> None:
        if (tools := answers.tools) and tools.form:
            self._tools = tools
            self._readers = [tools.reader() for _ in range(answers.num)]
            self._num_calls = [0] * answers.num

    def of_text(self, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._tools is not None:
            content, calls = self._tools.read(text)
            if calls:
                message |= {"content": content or None, "tool_calls": [*map(as_json, calls)]}
        return {"message": message}

    def read(self, index: int, text: str) -> tuple[str, Sequence[Call]]:
        """Return the content of a piece, and the calls that it completes."""
        reader = self._readers[index] if self._readers else None
        return reader.read(text) if reader else (text, [])

    def rest(self, index: int) -> tuple[str, Sequence[Call]]:
        """Return what was held back of a choice, as it ends."""
        reader = self._readers[index] if self._readers else None
        return reader.rest() if reader else ("", [])

    def of_piece(self, index: int, text: str) -> dict[str, Any]:
        return self._delta(index, *self.read(index, text))

    def of_rest(self, index: int) -> dict[str, Any] | None:
        content, calls = self.rest(index)
        return self._delta(index, content, calls) if content or calls else None

    def finish_of(self, index: int, finish: str) -> str:
        has_calls = bool(self._readers) and self._num_calls[index] > 0
        return "tool_calls" if has_calls and finish == "stop" else finish

    def _delta(self, index: int, content: str, calls: Sequence[Call]) -> dict[str, Any]:
        """Return what a chunk adds to a message: content, and whole calls."""
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            entries = enumerate(map(as_json, calls), self._num_calls[index])
            self._num_calls[index] += len(calls)
            delta["tool_calls"] = [{"index": number, **call} for number, call in entries]
        return {"delta": delta}

    def of_tokens(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not tokens:
            return None
        content = [
            {
                **_token_entry(one.spelled, one.logprob),
                "top_logprobs": [_token_entry(spelled, value) for spelled, value in one.top],
            }
            for one in tokens
        ]
        return {"content": content, "refusal": None}


def _text(spelled: bytes) -> str:
    return spelled.decode(errors="replace")


def _token_entry(spelled: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(spelled), "logprob": logprob, "bytes": [*spelled]}


def choice_of(
    index: int,
    content: dict[str, Any],
    finish: str | None,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}


def usage_of(answers: Answers, ends: Iterable[End]) -> dict[str, Any]:
    """Token counts of a request; `cached_tokens` are those of its session."""
    ends = list(ends)
    num_tokens = sum(end.num_tokens for end in ends)
    return {
        "prompt_tokens": answers.num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": answers.num_prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": answers.num_cached},
        "kvalign": {
            "evicted_tokens": answers.num_evicted + sum(end.num_evicted for end in ends),
            "forgotten_prompt_tokens": answers.num_forgotten,
            "reencoded_tokens": answers.num_reencoded,
            "edited_tokens": answers.num_edited,
        },
    }


def warning_of(answers: Answers) -> dict[str, str]:
    """Header about the forgotten part of a prompt when its answer begins; none without one."""
    if not (num := answers.num_forgotten):
        return {}
    what = f"{num} of the prompt's {answers.num_prompt} tokens are out of the cache and forgotten"
    return {WARNING: f"{what}: use a larger --cache-size of the server, or its --memory"}


def ignored_of(names: Iterable[str]) -> dict[str, str]:
    """Header that names a request's fields that no API has; none without one."""
    plain = (name.encode("ascii", "replace").decode()[:_LONGEST_NAME] for name in names)
    header = ", ".join("".join(x if x.isprintable() else "?" for x in name) for name in plain)
    return {IGNORED: header} if header else {}


async def events_of(answers: Answers, events: Events, receive: Receive) -> AsyncIterator[list]:
    """Yield the engine's available events, until the answers end or an error ends them. A client
    that disconnects, or a reader that stops, cancels them.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        events.put_nowait(_DISCONNECT)

    watching, num_left = asyncio.ensure_future(watch()), answers.num
    try:
        while num_left:
            batch: list[Event] = [await events.get()]
            while not events.empty():
                batch.append(events.get_nowait())
            if _DISCONNECT in batch:
                raise ClientDisconnect
            pieces = [event for event in batch if not isinstance(event, RequestError)]
            if pieces:
                yield pieces
            for event in batch:
                if isinstance(event, RequestError):
                    raise event
            num_left -= sum(isinstance(event, End) for event in batch)
    finally:
        watching.cancel()
        answers.cancel()


async def whole(
    form: TextForm, answers: Answers, events: Events, receive: Receive, headers: Mapping[str, str]
) -> Response:
    """The complete answer as one document, with these headers."""
    texts, ends = [""] * answers.num, dict[int, End]()
    tokens: list[list[TokenLogprob]] = [[] for _ in texts]
    async for batch in events_of(answers, events, receive):
        for event in batch:
            if isinstance(event, Piece):
                texts[event.index] += event.text
                tokens[event.index] += event.tokens
            else:
                ends[event.index] = event
    choices = []
    for i, text in enumerate(texts):
        content, finish = form.of_text(text), ends[i].finish
        if finish == "stop" and "tool_calls" in content.get("message", ()):
            finish = "tool_calls"
        choices.append(choice_of(i, content, finish, form.of_tokens(tokens[i])))
    usage = usage_of(answers, ends.values())
    headers = {**headers, **warning_of(answers)}
    return JSONResponse(form.document(form.kind, choices, usage=usage), headers=headers)


class EventStream(Response):
    """Answer that is sent piece by piece. A client that takes none in time is dropped."""

    media_type = "text/event-stream"
    last = "data: [DONE]\n\n"

    def __init__(
        self,
        form: TextForm,
        answers: Answers,
        events: Events,
        *,
        has_usage: bool,
        timeout: float,
        headers: Mapping[str, str] = MappingProxyType({}),
    ):
        self.form, self.answers, self.events = form, answers, events
        self.usage: dict[str, Any] = {"usage": None} if has_usage else {}
        self.timeout, self.status_code, self.background = timeout, 200, None
        how = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self.init_headers({**how, **headers} | warning_of(answers))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def put(body: str, more: bool = True) -> None:
            async with asyncio.timeout(self.timeout):
                await send({"type": "http.response.body", "body": body.encode(), "more_body": more})

        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(head)
            await put(self._first())
            ends = list[End]()
            try:
                async for batch in events_of(self.answers, self.events, receive):
                    ends += (x for x in batch if isinstance(x, End))
                    await put("".join(map(self._of_event, batch)))
            except RequestError as error:
                await put(self._of_error(error))
            else:
                await put(self._last(ends))
            await put(self.last, more=False)
        except (ClientDisconnect, OSError):  # TimeoutError is one
            pass
        finally:
            self.answers.cancel()

    def _first(self) -> str:
        numbers = range(self.answers.num) if self.form.opening else ()
        return "".join(self._chunk(i, self.form.opening) for i in numbers)

    def _last(self, ends: list[End]) -> str:
        if not self.usage:
            return ""
        usage = usage_of(self.answers, ends)
        return _line(self.form.document(self.form.chunk_kind, [], usage=usage))

    def _of_error(self, error: RequestError) -> str:
        return _line(error.form())

    def _of_event(self, event: Piece | End) -> str:
        form, index = self.form, event.index
        if isinstance(event, Piece):
            logprobs = form.of_tokens(event.tokens)
            return self._chunk(index, form.of_piece(index, event.text), logprobs=logprobs)
        rest = form.of_rest(index)
        last = self._chunk(index, rest) if rest else ""
        return last + self._chunk(index, form.of_end, form.finish_of(index, event.finish))

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        finish: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> str:
        choices = [choice_of(index, content, finish, logprobs)]
        return _line(self.form.document(self.form.chunk_kind, choices, **self.usage))


def _line(values: dict[str, Any]) -> str:
    return f"data: {json.dumps(values)}\n\n"
