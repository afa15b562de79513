"""Requests of OpenAI's API, checked field by field."""

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.messages import MOST_TOOLS, Message, NamedTool, RequestPart, Tool, matched
from kvalign.streaming.calls import read_json
from kvalign.streaming.sampling import DRAWS, MOST_PENALTY

Token = Annotated[int, Field(ge=0)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Choices = Annotated[int, Field(ge=1, le=128)]
Penalty = Annotated[float, Field(ge=1 / MOST_PENALTY, le=MOST_PENALTY, allow_inf_nan=False)]
# What a request gives a chat template. The marks of special tokens cannot stand in the text.
TemplateName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
TemplateText = Annotated[str, Field(pattern=r"^[A-Za-z0-9_ .,:-]{0,64}$")]
OF_REQUESTS = (*DRAWS, "repetition_penalty")
"""Fields that are those of `Sampling`, by the same names."""

M = TypeVar("M", bound="Request")
T = TypeVar("T")
Several = Annotated[list[T], Field(min_length=1, fail_fast=True)]
MOST_MESSAGES = 4096


class StreamOptions(RequestPart):
    within = "stream_options"
    include_usage: bool | None = None
    include_cache: bool | None = None  # what is held, and what a token took back, as it comes


class Request(RequestPart):
    """Fields that both kinds of requests have."""

    # Who asks, what OpenAI stores, how dear and how fast it answers, and what it caches.
    harmless: ClassVar[Collection[str]] = (
        *("user", "safety_identifier", "metadata", "store", "service_tier"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    )
    _ignored: list[str] = PrivateAttr(default_factory=list)
    _is_retry: bool = False
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Choices | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=4, fail_fast=True)] | None = None

    @field_validator("top_k")
    @classmethod
    def _from_all(cls, top_k: int | None) -> int | None:
        return 0 if top_k == -1 else top_k  # as vLLM has it

    @property
    def ignored(self) -> list[str]:
        """Return the names of its fields that no API has."""
        return self._ignored

    @property
    def is_retry(self) -> bool:
        """Return whether OpenAI's client says that it sends this again."""
        return self._is_retry

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_top(self) -> int | None:
        """Number of likeliest tokens whose logprobs are told beside each token's; None: none is."""
        return None

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """JSON schema that the answer obeys; None: any text."""
        return None


# Who answers and how the answer is sent; what is answered, which `sessions.digest` compares; and
# the other names of fields.
_NOT_OF_THE_ANSWER = {
    *("model", "session", "stream", "stream_options", "messages", "max_completion_tokens"),
    *("instructions", "previous_response_id", "max_output_tokens", "store", "metadata", "include"),
}


class ResponseFormat(RequestPart):
    """Form of an answer."""

    harmless: ClassVar = ("description",)
    within, inner = "response_format", "json_schema"
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    strict: bool | None = None  # it is always obeyed
    of: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """JSON schema that the answer obeys; None: any text."""
        if self.type == "json_schema" and self.of is None:
            raise RequestError(f"{self.within}: the schema is missing", param=self.within)
        return {"text": None, "json_object": {"type": "object"}, "json_schema": self.of}[self.type]


class ChatRequest(Request):
    """A request to /v1/chat/completions."""

    messages: Annotated[Several[Message], Field(max_length=MOST_MESSAGES)]
    session: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$")] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: (
        Annotated[dict[TemplateName, bool | TemplateText], Field(max_length=16)] | None
    ) = None

    @field_validator("messages")
    @classmethod
    def _in_order(cls, messages: list[Message]) -> list[Message]:
        if any(message.role == "system" for message in messages[1:]):
            raise ValueError("only the first message may be a system message")
        return matched(messages)

    @field_validator("response_format")
    @classmethod
    def _of_any_text(cls, form: ResponseFormat | None) -> ResponseFormat | None:
        return None if form is None or form.type == "text" else form

    @model_validator(mode="after")
    def _fitting(self) -> "ChatRequest":
        def refuse(what: str, param: str, code: str | None = None) -> NoReturn:
            raise RequestError(what, param=param, code=code)

        if self.continue_final_message:
            if self.messages[-1].role != "assistant" or self.session is None:
                what = "continue_final_message needs a session, and an answer as the last message"
                refuse(what, "continue_final_message")
            if self.tools or self.schema_of_answer is not None:
                what = "continue_final_message is not supported with tools and response_format"
                refuse(f"{what}: leave them out", "continue_final_message", "unsupported")
        elif self.messages[-1].role not in ("user", "tool"):
            refuse("messages: the last message must be the user's or a tool's", "messages")
        names, choice = [tool.name for tool in self.tools or ()], self.tool_choice
        if len({*names}) < len(names):
            refuse("tools has two of the same name", "tools")
        if isinstance(choice, NamedTool) and choice.name not in names:
            what = f"tool_choice names {choice.name!r:.80}, which is not among tools"
            refuse(what, "tool_choice")
        if choice == "required" and not names:
            refuse("tool_choice needs tools", "tool_choice")
        if names and self.may_call and self.schema_of_answer is not None:
            what = "response_format is not supported with tools: leave one of them out, or ask for "
            refuse(f"{what}tool_choice: none", "response_format", "unsupported")
        if self.top_logprobs and self.num_top is None:
            refuse("top_logprobs needs logprobs: true", "top_logprobs")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            what = "max_tokens and max_completion_tokens differ: give one of them"
            refuse(what, "max_completion_tokens")
        return self

    @property
    def may_call(self) -> bool:
        """Return whether a tool may be called."""
        return self.tool_choice != "none"

    @property
    def must_call(self) -> list[str]:
        """Names of the tools, one of which must be called; empty: the model may choose."""
        if isinstance(self.tool_choice, NamedTool):
            return [self.tool_choice.name]
        is_required = self.tool_choice == "required"
        return [tool.name for tool in self.tools or ()] if is_required else []

    @property
    def fields(self) -> str:
        """Return a digest of the fields that change an answer, without messages."""
        values = self.model_dump(exclude=_NOT_OF_THE_ANSWER)
        values |= {"max_tokens": self.most_tokens, "stop": self.stops, "n": self.num_choices}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    @property
    def opening(self) -> str:
        """Return a digest of the tools and the values for the chat template; "" without one."""
        if not (self.tools or self.chat_template_kwargs):
            return ""
        parts: list[Any] = [tool.for_template() for tool in self.tools or ()]
        if self.chat_template_kwargs:
            parts.append(self.chat_template_kwargs)
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        form = self.response_format
        return form.schema_of_answer if form else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class Completion(Request):
    """A request to /v1/completions."""

    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt: str | Several[str] | Several[Token] | Several[Several[Token]]

    @property
    def prompts(self) -> list[Any]:
        """Prompts, each a text or ids."""
        prompt = self.prompt
        is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        return [prompt] if is_one else list(prompt)

    @property
    def num_top(self) -> int | None:
        return self.logprobs

    @property
    def most_tokens(self) -> int:
        return self.max_tokens or 16  # as OpenAI's API has it


def parsed(model: type[M], body: bytes, headers: Mapping[str, str]) -> M:
    """A request from its body and headers, with names in lower case; RequestError if invalid."""
    ignored, session = list[str](), headers.get("x-session-id")
    try:
        values = read_json(body.decode())
        if isinstance(values, dict) and values.get("session") is None and session is not None:
            values["session"] = session
        request = model.model_validate(values, context={"ignored": ignored})
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        param = str(fault["loc"][0]) if fault["loc"] else None
        what = fault["msg"].removeprefix("Value error, ")
        raise RequestError(f"{param or 'the body'}: {what}", param=param) from None
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    request._ignored = ignored
    request._is_retry = headers.get("x-stainless-retry-count", "0") != "0"
    return request
