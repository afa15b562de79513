"""/v1/responses: its requests, and its answers as one document or as events.

A response belongs to a session, which `previous_response_id` continues. Its id is the session's
name and the number of tokens before the answer, so it needs no list, and is known after a restart.
"""

import json
import secrets
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.messages import Item, RequestPart, messages_of, unsupported
from kvalign.app.serve.replies import AnswerPart, ChatForm, usage_of
from kvalign.app.serve.turn import Answers, End
from kvalign.app.serve.wire import MOST_MESSAGES, ChatRequest, ResponseFormat

_LOGPROBS = "message.output_text.logprobs"
_OF_CHATS = (
    *("n", "session", "logprobs", "response_format"),
    *("max_completion_tokens", "chat_template_kwargs"),
)
_TEXT, _THOUGHTS = "message", "reasoning"  # items, and what their events are called
_EVENTS = {_TEXT: "response.output_text", _THOUGHTS: "response.reasoning_text"}
_ID = r"^resp_[0-9a-f]{24}[0-9a-f]{8}$"


class TextFormat(ResponseFormat):
    within = "text"


class TextOptions(RequestPart):
    within = "text"
    format: TextFormat | None = None


class ResponseRequest(ChatRequest):
    """A request to /v1/responses: a chat whose messages are items."""

    harmless = (*ChatRequest.harmless, "max_tool_calls", "background_options")
    messages: Annotated[  # type: ignore[assignment]
        list[Item],
        Field(alias="input", min_length=1, max_length=MOST_MESSAGES, fail_fast=True),
        AfterValidator(messages_of),
    ]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(pattern=_ID)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None  # what of it is not here is not in an answer either
    text: TextOptions | None = None
    _root: str = PrivateAttr(default_factory=lambda: f"resp_{secrets.token_hex(12)}")

    @classmethod
    def obeyed(cls, values: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
        for name in _OF_CHATS:
            if values.get(name) is not None and (name, values[name]) != ("n", 1):
                raise unsupported(name, name)
        fields = super().obeyed(values, ignored)
        if isinstance(fields.get("input"), str):
            fields["input"] = [{"role": "user", "content": fields["input"]}]
        if isinstance(fields.get("input"), list) and isinstance(fields.get("instructions"), str):
            system = {"role": "system", "content": fields["instructions"]}
            fields["input"] = [system, *fields["input"]]
        return fields

    @model_validator(mode="after")
    def _in_session(self) -> "ResponseRequest":
        if self.store is False and self.previous_response_id is not None:
            what = "store: false is not supported with previous_response_id, whose session grows"
            raise RequestError(what, param="store", code="unsupported")
        if self.num_top is not None and self.tools and self.may_call:
            param = "top_logprobs" if self.top_logprobs else "include"
            what = f"{param}: logprobs are not supported with tools, but with tool_choice: none"
            raise RequestError(what, param=param, code="unsupported")
        self.session = self.name if self.store is not False else None
        return self

    @property
    def name(self) -> str:
        return (self.previous_response_id or self._root)[: len(self._root)]

    @property
    def previous(self) -> int | None:
        """Tokens before the answer that this request continues; None: it begins a session."""
        name = self.previous_response_id
        return None if name is None else int(name[len(self._root) :], 16)

    @property
    def num_top(self) -> int | None:
        has_logprobs = self.top_logprobs or _LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if has_logprobs else None

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        form = self.text and self.text.format
        return form.schema_of_answer if form else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_output_tokens or self.max_tokens


class ResponseForm(ChatForm):
    kind, last = "response", ""  # these streams have no [DONE]

    def __init__(self, model: str, request: ResponseRequest, answers: Answers):
        super().__init__(model, request, answers)
        self.request, self.id = request, f"{request.name}{answers.num_prompt:08x}"
        # Of a stream, in which each item of the output begins, comes in pieces, and ends.
        self._number, self._output = 0, list[dict[str, Any]]()
        self._finish: str | None = None
        self._item: dict[str, Any] | None = None  # of text or of thoughts, that comes

    def part(self, kind: str, text: str, logprobs: Sequence[dict] = ()) -> dict[str, Any]:
        if kind == _THOUGHTS:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}

    def whole(
        self, answers: Sequence[Sequence[AnswerPart]], usage: dict[str, Any]
    ) -> dict[str, Any]:
        for part in answers[0]:
            self.events_of(part)
        return self._ended(usage)[1]

    def response(
        self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        request = self.request
        tools = [{**tool.model_dump(), "strict": bool(tool.strict)} for tool in request.tools or ()]
        form: Any = {"type": "text"}
        if request.text and request.text.format:
            form = request.text.format.model_dump(by_alias=True, exclude_none=True)
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        choice: Any = request.tool_choice or "auto"
        if not isinstance(choice, str):
            choice = choice.model_dump()
        return {
            "id": self.id,
            "object": self.kind,
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "store": request.store is not False,
            "temperature": request.temperature,
            "text": {"format": form},
            "tool_choice": choice,
            "tools": tools,
            "top_p": request.top_p,
            "truncation": "auto",
            "usage": usage and _usage(usage),
        }

    def begin(self) -> str:
        begun = {"response": self.response("in_progress", [])}
        created = self._event("response.created", **begun)
        return created + self._event("response.in_progress", **begun)

    def events_of(self, part: AnswerPart) -> str:
        events, self._finish = "", part.finish
        if part.thoughts:
            events += self._delta(_THOUGHTS, part.thoughts)
        if part.content or part.tokens:
            logprobs = (self.of_tokens(part.tokens) or {"content": []})["content"]
            events += self._delta(_TEXT, part.content, logprobs)
        for call in part.calls:
            events += self._item_is_whole("completed") + self._call(call)
        return events

    def end(self, ends: Sequence[End]) -> str:
        events, whole = self._ended(usage_of(self.answers, ends))
        return events + self._event(f"response.{whole['status']}", response=whole)

    def _ended(self, usage: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The events of the last item, and the response, which has at least one."""
        status = "incomplete" if self._finish == "length" else "completed"
        events = "" if self._output or self._item else self._delta(_TEXT, "")
        events += self._item_is_whole(status)
        return events, self.response(status, self._output, usage)

    def _delta(self, kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> str:
        """A piece of an item of this kind, which may begin."""
        events = ""
        if self._item is None or self._item["type"] != kind:
            events = self._item_is_whole("completed") + self._item_begins(kind)
        self._text += text
        self._logprobs += logprobs
        more = {"logprobs": [*logprobs]} if kind == _TEXT else {}
        if text or logprobs:
            events += self._event(f"{_EVENTS[kind]}.delta", **self._place, delta=text, **more)
        return events

    def _item_begins(self, kind: str) -> str:
        self._text, self._logprobs = "", list[Any]()
        fields: dict[str, Any] = {"summary": []} if kind == _THOUGHTS else {"role": "assistant"}
        head = {"id": f"{kind[:3]}_{secrets.token_hex(12)}", "type": kind, **fields}
        self._item = {**head, "status": "in_progress", "content": []}
        added, part = self._added(self._item), self.part(kind, "")
        self._place["content_index"] = 0
        return added + self._event("response.content_part.added", **self._place, part=part)

    def _added(self, item: dict[str, Any]) -> str:
        number = len(self._output)
        self._place = {"item_id": item["id"], "output_index": number}
        return self._event("response.output_item.added", output_index=number, item=item)

    def _item_is_whole(self, status: str) -> str:
        if self._item is None:
            return ""
        kind = self._item["type"]
        part = self.part(kind, self._text, self._logprobs)
        item = {**self._item, "status": status, "content": [part]}
        more = {"logprobs": self._logprobs} if kind == _TEXT else {}
        self._item = None
        return (
            self._event(f"{_EVENTS[kind]}.done", **self._place, text=self._text, **more)
            + self._event("response.content_part.done", **self._place, part=part)
            + self._item_ends(item)
        )

    def _call(self, call: dict[str, Any]) -> str:
        head = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "completed"}
        item = {**head, "call_id": call["id"], **call["function"]}
        kind, function = "response.function_call_arguments", call["function"]
        return (
            self._added({**item, "arguments": "", "status": "in_progress"})
            + self._event(f"{kind}.delta", **self._place, delta=function["arguments"])
            + self._event(f"{kind}.done", **self._place, **function)
            + self._item_ends(item)
        )

    def _item_ends(self, item: dict[str, Any]) -> str:
        self._output.append(item)
        number = len(self._output) - 1
        return self._event("response.output_item.done", output_index=number, item=item)

    def of_error(self, error: RequestError) -> str:
        return self._event("error", **error.form()["error"] | {"type": "error"})

    def _event(self, kind: str, **values: Any) -> str:
        values = {**values, "type": kind, "sequence_number": self._number}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(values)}\n\n"


def _usage(counts: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
        "kvalign": counts["kvalign"],
    }
