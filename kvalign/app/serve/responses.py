"""/v1/responses: its requests, and its answers as one document or as events.

A response belongs to a session, which `previous_response_id` continues. Its id is the session's
name and the number of tokens before the answer, so it needs no list, and is known after a restart.
"""

import json
import secrets
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from kvalign.app.serve.answers import Answers, End, Piece
from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.form import Form
from kvalign.app.serve.messages import Message
from kvalign.app.serve.replies import ChatForm, EventStream, usage_of
from kvalign.app.serve.turn import Chosen
from kvalign.app.serve.wire import MOST_MESSAGES, OF_REQUESTS, OF_TOOLS, Chat, Request

_LOGPROBS = "message.output_text.logprobs"
_ID = r"^resp_[0-9a-f]{24}[0-9a-f]{8}$"


class Part(Form):
    harmless: ClassVar = {
        "annotations": "links in an answer",
        "logprobs": "sent back with an answer",
    }
    refused: ClassVar = {"image_url": (), "file_id": (), "file_data": (), "detail": ()}
    within = "input"
    type: Literal["input_text", "output_text"]
    text: str


class Item(Form):
    """A message of the input."""

    harmless: ClassVar = {"id": "its name", "status": "whether it was complete", "phase": "a label"}
    within = "input"
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(max_length=256)]

    @property
    def message(self) -> Message:
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        return Message(role="system" if self.role == "developer" else self.role, content=content)


class TextFormat(Form):
    within = "text"
    refused: ClassVar = {"verbosity": ("medium",)}
    format: dict[str, Any] | None = None


class ResponseRequest(Request):
    """A request to /v1/responses."""

    harmless: ClassVar = {
        **{name: why for name, why in Chat.harmless.items() if name not in ("metadata", "store")},
        "max_tool_calls": "says how often tools are called, and there are none",
        "background_options": "says how a response in the background goes on",
    }
    refused: ClassVar = {
        **Request.refused,
        **{name: Chat.refused[name] for name in ("functions", "verbosity")},
        **OF_TOOLS,
        "access_programs": (),
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "messages": (),
        "moderation": (),
        "prompt": (),
        "reasoning": ({}, {"effort": "none"}),
        "reasoning_effort": (),
        "response_format": (),
        "logprobs": (),
        "truncation": ("auto",),
    }
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MOST_MESSAGES)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(pattern=_ID)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None  # what of it is not here is not in an answer either
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    text: TextFormat | None = None
    _root: str = PrivateAttr(default_factory=lambda: f"resp_{secrets.token_hex(12)}")

    @classmethod
    def obeyed(cls, values: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
        for name in ("n", "session"):
            if values.get(name) not in (None, 1):
                raise RequestError(
                    f"{name} is not supported: leave it out", param=name, code="unsupported"
                )
        return super().obeyed(values, ignored)

    @property
    def name(self) -> str:
        """Name of the session."""
        return (self.previous_response_id or self._root)[: len(self._root)]

    @property
    def previous(self) -> int | None:
        """Tokens before the answer that this request continues; None: it begins a session."""
        given = self.previous_response_id
        return None if given is None else int(given[len(self._root) :], 16)

    @property
    def as_chat(self) -> Chat:
        """The same request to /v1/chat/completions."""
        if self.store is False and self.previous_response_id is not None:
            raise RequestError(
                "store: false is not supported with previous_response_id, whose session grows",
                param="store",
                code="unsupported",
            )
        if isinstance(self.input, str):
            messages = [Message(role="user", content=self.input)]
        else:
            messages = [item.message for item in self.input]
        if self.instructions is not None:
            messages = [Message(role="system", content=self.instructions), *messages]
        same = {name: getattr(self, name) for name in (*OF_REQUESTS, "seed", "stop", "model")}
        has_logprobs = bool(self.top_logprobs or _LOGPROBS in (self.include or ()))
        values = {
            **{name: value for name, value in same.items() if value is not None},
            "messages": [message.model_dump() for message in messages],
            "max_tokens": self.max_output_tokens or self.max_tokens,
            "session": self.name if self.store is not False else None,
            "response_format": self._format(),
            "logprobs": has_logprobs,
            "top_logprobs": self.top_logprobs,
        }
        return Chat.model_validate(values)

    def _format(self) -> dict[str, Any] | None:
        form = self.text and self.text.format
        if not form or form.get("type") != "json_schema":
            return form or None
        rest = {name: value for name, value in form.items() if name != "type"}
        return {"type": "json_schema", "json_schema": rest}


class ResponseForm(ChatForm):
    """Answers of /v1/responses."""

    kind, opening = "response", {}
    request: ResponseRequest

    def for_request(self, request: Any, answers: Answers) -> None:
        self.request, self.id = request, f"{request.name}{answers.num_prompt:08x}"
        self.item_id = "msg_" + secrets.token_hex(12)

    def part(self, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        told = logprobs["content"] if logprobs else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": told}

    def item(self, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.item_id, "type": "message", "role": "assistant"}
        return {**head, "status": status, "content": parts}

    def document(self, kind: str, choices: list[dict], **usage: Any) -> dict[str, Any]:
        """The response: in progress without a choice, else with its message."""
        request = self.request
        status, output = "in_progress", []
        if choices:
            (choice,) = choices
            status = "incomplete" if choice["finish_reason"] == "length" else "completed"
            part = self.part(choice["message"]["content"], choice["logprobs"])
            output = [self.item(status, [part])]
        counts = usage.get("usage")
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": kind,
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": request.previous_response_id,
            "store": request.store is not False,
            "temperature": request.temperature,
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": request.top_p,
            "truncation": "auto",
            "usage": counts and _usage(counts),
        }


def _usage(counts: dict[str, Any]) -> dict[str, Any]:
    """Token counts by the names of /v1/responses."""
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
        "kvalign": counts["kvalign"],
    }


class ResponseStream(EventStream):
    """Events of a response: its item and its part begin, text comes, and all end."""

    form: ResponseForm
    last = ""  # these streams have no [DONE]
    _number = 0

    def _first(self) -> str:
        self._text, self._finish, self._tokens = "", "", list[Chosen]()
        form, started = self.form, {"response": self.form.document("response", [])}
        item = {"output_index": 0, "item": form.item("in_progress", [])}
        return (
            self._event("response.created", **started)
            + self._event("response.in_progress", **started)
            + self._event("response.output_item.added", **item)
            + self._event("response.content_part.added", **self._place, part=form.part(""))
        )

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.form.item_id, "output_index": 0, "content_index": 0}

    def _of_event(self, event: Piece | End) -> str:
        if isinstance(event, End):
            self._finish = event.finish
            return ""
        self._text += event.text
        self._tokens += event.tokens
        told = self.form.of_tokens(event.tokens)
        logprobs = told["content"] if told else []
        delta = {"delta": event.text, "logprobs": logprobs}
        return self._event("response.output_text.delta", **self._place, **delta)

    def _last(self, ends: list[End]) -> str:
        form, logprobs = self.form, self.form.of_tokens(self._tokens)
        choice = {**form.of_text(self._text), "logprobs": logprobs, "finish_reason": self._finish}
        whole = form.document("response", [choice], usage=usage_of(self.answers, ends))
        (item,) = whole["output"]
        (part,) = item["content"]
        done = {"text": self._text, "logprobs": part["logprobs"]}
        return (
            self._event("response.output_text.done", **self._place, **done)
            + self._event("response.content_part.done", **self._place, part=part)
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{whole['status']}", response=whole)
        )

    def _of_error(self, error: RequestError) -> str:
        return self._event("error", **error.form()["error"] | {"type": "error"})

    def _event(self, kind: str, **values: Any) -> str:
        values = {**values, "type": kind, "sequence_number": self._number}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(values)}\n\n"
