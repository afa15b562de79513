"""From the engine's events to what a client reads: one JSON document, or Server-Sent Events."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvalign.app.serve.answers import Answers, End, Event, Piece
from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.forms import TextForm, usage_of

_GONE = "gone"
Events = asyncio.Queue[Any]


async def events_of(answers: Answers, events: Events, receive: Receive) -> AsyncIterator[list]:
    """What the engine tells, all that is there at a time, until the answers have ended.

    A client that leaves, or a reader that stops, cancels them.

    Raises:
        RequestError: the engine's, that ends them.
        ClientDisconnect: nobody listens.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        events.put_nowait(_GONE)

    watching, left = asyncio.ensure_future(watch()), answers.num
    try:
        while left:
            found: list[Event] = [await events.get()]
            while not events.empty():
                found.append(events.get_nowait())
            if _GONE in found:
                raise ClientDisconnect
            told = [event for event in found if not isinstance(event, RequestError)]
            if told:
                yield told
            for event in found:
                if isinstance(event, RequestError):
                    raise event
            left -= sum(isinstance(event, End) for event in found)
    finally:
        watching.cancel()
        answers.cancel()


async def whole(form: TextForm, answers: Answers, events: Events, receive: Receive) -> Response:
    """All of an answer at once."""
    texts, ends = [""] * answers.num, dict[int, End]()
    async for found in events_of(answers, events, receive):
        for event in found:
            if isinstance(event, Piece):
                texts[event.index] += event.text
            else:
                ends[event.index] = event
    choices = [form.choice(i, text, ends[i].finish) for i, text in enumerate(texts)]
    usage = usage_of(answers, sum(end.num_tokens for end in ends.values()))
    return JSONResponse(form.whole(choices, usage))


class EventStream(Response):
    """An answer as it comes; a client that does not take a piece in time is left."""

    media_type = "text/event-stream"

    def __init__(
        self,
        form: TextForm,
        answers: Answers,
        events: Events,
        *,
        has_usage: bool,
        timeout: float,
    ):
        self.form, self.answers, self.events = form, answers, events
        self.usage: dict[str, Any] = {"usage": None} if has_usage else {}
        self.timeout, self.status_code, self.background = timeout, 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def put(body: str, more: bool = True) -> None:
            async with asyncio.timeout(self.timeout):
                await send({"type": "http.response.body", "body": body.encode(), "more_body": more})

        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(head)
            openings = filter(None, map(self.form.opening, range(self.answers.num)))
            await put("".join(self._chunk(choice) for choice in openings))
            num_tokens = 0
            try:
                async for found in events_of(self.answers, self.events, receive):
                    num_tokens += sum(x.num_tokens for x in found if isinstance(x, End))
                    await put("".join(map(self._of_event, found)))
            except RequestError as error:
                await put(_line(error.form()))
            else:
                if self.usage:
                    usage = usage_of(self.answers, num_tokens)
                    await put(_line(self.form.chunk([], usage=usage)))
            await put("data: [DONE]\n\n", more=False)
        except (ClientDisconnect, OSError):  # TimeoutError is one
            pass
        finally:
            self.answers.cancel()

    def _of_event(self, event: Event) -> str:
        if isinstance(event, Piece):
            return self._chunk(self.form.piece(event.index, event.text))
        assert isinstance(event, End)
        return self._chunk(self.form.piece(event.index, "", event.finish))

    def _chunk(self, choice: dict[str, Any]) -> str:
        return _line(self.form.chunk([choice], **self.usage))


def _line(values: dict[str, Any]) -> str:
    return f"data: {json.dumps(values)}\n\n"
