"""Replies in the forms of OpenAI's API, as one JSON document or as Server-Sent Events."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.reading import PieceReader
from kvalign.app.serve.turn import AnswerPiece, Answers, End, Event, TokenLogprob
from kvalign.app.serve.wire import Request

HEADERS = WARNING, IGNORED = "X-KVAlign-Warning", "X-KVAlign-Ignored"
_DISCONNECT = "gone"
_LONGEST_NAME = 80
Events = asyncio.Queue[Any]


@dataclass(frozen=True)
class AnswerPart:
    """Part of an answer: thoughts, content, whole calls of tools; with the last part its end."""

    index: int
    thoughts: str
    content: str
    calls: Sequence[dict[str, Any]]
    first_call: int  # number of the first of these calls in the answer
    tokens: Sequence[TokenLogprob] = ()
    end: End | None = None
    cache: dict[str, Any] | None = None

    @property
    def finish(self) -> str | None:
        """Reason for the end; None where more comes."""
        if self.end is None:
            return None
        is_call = self.end.finish == "stop" and self.first_call + len(self.calls) > 0
        return "tool_calls" if is_call else self.end.finish


class TextForm:
    """Answers of /v1/completions: one document, or the events of a stream."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"
    opening: ClassVar[dict[str, Any]] = {}  # what a choice says in a chunk before its text
    of_end: ClassVar[dict[str, Any]] = {"text": ""}  # and in its last one
    last = "data: [DONE]\n\n"

    def __init__(self, model: str, request: Request, answers: Answers):
        self.model, self.id, self.answers = model, self.prefix + secrets.token_hex(12), answers
        self.created = int(time.time())
        has_usage = request.stream_options and request.stream_options.include_usage
        self.usage: dict[str, Any] = {"usage": None} if has_usage else {}  # of each chunk

    def of_whole(self, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        return {"text": "".join(part.content for part in parts)}

    def of_part(self, part: AnswerPart) -> dict[str, Any]:
        """Return a choice's fields for a part, in a chunk."""
        return {"text": part.content}

    def of_tokens(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Return the logprobs of tokens; None without one."""
        if not tokens:
            return None
        # Parts of characters have one text: the likeliest of them is told.
        tops = [{_text(x): value for x, value in reversed(one.top)} for one in tokens]
        return {
            "tokens": [_text(one.spelled) for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [one.offset for one in tokens],
        }

    def whole(
        self, answers: Sequence[Sequence[AnswerPart]], usage: dict[str, Any]
    ) -> dict[str, Any]:
        """The document of complete answers, each in its parts."""
        choices = []
        for index, parts in enumerate(answers):
            logprobs = self.of_tokens([one for part in parts for one in part.tokens])
            how = {"logprobs": logprobs, "finish_reason": parts[-1].finish}
            choices.append({"index": index, **self.of_whole(parts), **how})
        return self.document(self.kind, choices, usage=usage)

    def document(self, kind: str, choices: list[dict], **usage: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **usage}

    def begin(self) -> str:
        numbers = range(self.answers.num) if self.opening else ()
        return "".join(self._chunk(i, self.opening) for i in numbers)

    def events_of(self, part: AnswerPart) -> str:
        chunk = ""
        if not part.end or part.thoughts or part.content or part.calls:
            how: dict[str, Any] = {"logprobs": self.of_tokens(part.tokens)}
            how |= {"kvalign": part.cache} if part.cache else {}
            chunk = self._chunk(part.index, self.of_part(part), **how)
        if part.end:
            chunk += self._chunk(part.index, self.of_end, finish_reason=part.finish)
        return chunk

    def end(self, ends: Sequence[End]) -> str:
        """The last events of complete answers, before `last`."""
        if not self.usage:
            return ""
        return _line(self.document(self.chunk_kind, [], usage=usage_of(self.answers, ends)))

    def of_error(self, error: RequestError) -> str:
        return _line(error.form())

    def _chunk(self, index: int, content: dict[str, Any], **how: Any) -> str:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": None, **how}
        return _line(self.document(self.chunk_kind, [choice], **self.usage))


class ChatForm(TextForm):
    """Answers of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    opening: ClassVar[dict[str, Any]] = {"delta": {"role": "assistant", "content": ""}}
    of_end: ClassVar[dict[str, Any]] = {"delta": {}}

    def of_whole(self, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        content = "".join(part.content for part in parts)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if thoughts := "".join(part.thoughts for part in parts):
            message["reasoning_content"] = thoughts
        if calls := [call for part in parts for call in part.calls]:
            message |= {"content": content or None, "tool_calls": calls}
        return {"message": message}

    def of_part(self, part: AnswerPart) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": part.content} if part.content else {}
        if part.thoughts:
            delta["reasoning_content"] = part.thoughts
        if part.calls:
            calls = enumerate(part.calls, part.first_call)
            delta["tool_calls"] = [{"index": number, **call} for number, call in calls]
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


def usage_of(answers: Answers, ends: Sequence[End]) -> dict[str, Any]:
    """Token counts of a request; `cached_tokens` are those of its session."""
    num_tokens = sum(end.num_tokens for end in ends)
    return {
        "prompt_tokens": answers.num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": answers.num_prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": answers.num_cached},
        "completion_tokens_details": {"reasoning_tokens": sum(end.num_thoughts for end in ends)},
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


async def parts_of(
    answers: Answers, events: Events, receive: Receive
) -> AsyncIterator[list[AnswerPart]]:
    """Yield parts until answers end, or an error ends them; a client that leaves cancels them."""
    reading = answers.reading
    readers = [PieceReader(reading) for _ in range(answers.num)]
    num_calls = [0] * answers.num

    def part_of(event: AnswerPiece | End) -> AnswerPart:
        index, text, tokens, end, cache = event.index, "", tuple[TokenLogprob, ...](), None, None
        if isinstance(event, AnswerPiece):
            text, tokens, cache = event.text, event.tokens, event.cache
        else:
            end = event
        said = readers[index].read(text, is_last=end is not None)
        first, num_calls[index] = num_calls[index], num_calls[index] + len(said.calls)
        calls = reading.calls(said.calls, index, first)
        return AnswerPart(index, said.thoughts, said.text, calls, first, tokens, end, cache)

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
            parts = [part_of(event) for event in batch if not isinstance(event, RequestError)]
            if parts:
                yield parts
            for event in batch:
                if isinstance(event, RequestError):
                    raise event
            num_left -= sum(part.end is not None for part in parts)
    finally:
        watching.cancel()
        answers.cancel()


async def whole(
    form: TextForm, events: Events, receive: Receive, ignored: Iterable[str]
) -> Response:
    """The complete answer as one document, with headers, which name the `ignored` fields."""
    answers = form.answers
    parts: list[list[AnswerPart]] = [[] for _ in range(answers.num)]
    async for batch in parts_of(answers, events, receive):
        for part in batch:
            parts[part.index].append(part)
    usage = usage_of(answers, [part.end for one in parts for part in one if part.end])
    return JSONResponse(form.whole(parts, usage), headers=ignored_of(ignored) | warning_of(answers))


class EventStream(Response):
    """Answer that is sent piece by piece. A client that takes none in time is dropped."""

    media_type = "text/event-stream"

    def __init__(self, form: TextForm, events: Events, timeout: float, ignored: Iterable[str]):
        self.form, self.events, self.timeout = form, events, timeout
        self.status_code, self.background = 200, None
        how = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self.init_headers(how | ignored_of(ignored) | warning_of(form.answers))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def put(body: str, more: bool = True) -> None:
            async with asyncio.timeout(self.timeout):
                await send({"type": "http.response.body", "body": body.encode(), "more_body": more})

        form, ends = self.form, list[End]()
        try:
            head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(head)
            await put(form.begin())
            try:
                async for batch in parts_of(form.answers, self.events, receive):
                    ends += (part.end for part in batch if part.end)
                    await put("".join(map(form.events_of, batch)))
                await put(form.end(ends))
            except RequestError as error:
                await put(form.of_error(error))
            await put(form.last, more=False)
        except (ClientDisconnect, OSError):  # TimeoutError is one
            pass
        finally:
            form.answers.cancel()


def _line(values: dict[str, Any]) -> str:
    return f"data: {json.dumps(values)}\n\n"
