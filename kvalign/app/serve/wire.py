"""Requests of OpenAI's API, checked field by field."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from kvalign.app.serve.bodies import values_of
from kvalign.app.serve.errors import RequestError

Token = Annotated[int, Field(ge=0)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Choices = Annotated[int, Field(ge=1, le=128)]
# What other values than these would change of an answer is not served.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "prediction": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}
# What changes no token of an answer.
_IGNORED = (
    *("user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key"),
    *("prompt_cache_retention", "safety_identifier", "reasoning_effort", "verbosity"),
)

_LONGEST_KEY = 255

M = TypeVar("M", bound="Asked")
T = TypeVar("T")
Several = Annotated[list[T], Field(min_length=1, fail_fast=True)]
MOST_MESSAGES = 4096
_MOST_PARTS = 256  # of a message


class StreamOptions(BaseModel, extra="ignore", strict=True):
    include_usage: bool | None = None


class Asked(BaseModel, extra="forbid", strict=True):
    """Fields that both kinds of requests have."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Choices | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4, fail_fast=True)] | None = None
    session: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$")] | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_served(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, neutral in _NEUTRAL.items():
            if values.get(name) is not None and values[name] not in neutral:
                raise RequestError(
                    f"{name} is not supported: leave it out", param=name, code="unsupported"
                )
        without = {*_NEUTRAL, *_IGNORED}
        for name in values:
            if name not in without and name not in cls.model_fields:
                raise RequestError(f"{name:.80}: unknown parameter", param=name)
        return {name: value for name, value in values.items() if name not in without}

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class TextPart(BaseModel, extra="forbid", strict=True):
    type: Literal["text"]
    text: str


class Message(BaseModel, extra="ignore", strict=True):
    """One message; `content` is its text."""

    role: Literal["system", "user", "assistant"]
    content: str

    @model_validator(mode="before")
    @classmethod
    def _as_text(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if values.get("tool_calls") or values.get("function_call"):
            raise RequestError("tool calls are not supported", param="messages")
        role = "system" if values.get("role") == "developer" else values.get("role")
        content = values.get("content")
        if isinstance(content, list):
            if len(content) > _MOST_PARTS:
                raise RequestError(
                    f"a message has at most {_MOST_PARTS} parts, got {len(content)}",
                    param="messages",
                )
            content = "".join(TextPart.model_validate(part).text for part in content)
        return {"role": role, "content": content}


class Chat(Asked):
    """A request to /v1/chat/completions."""

    messages: Annotated[
        list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    ]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @field_validator("messages")
    @classmethod
    def _in_order(cls, messages: list[Message]) -> list[Message]:
        if any(message.role == "system" for message in messages[1:]):
            raise ValueError("only the first message may be a system message")
        if messages[-1].role != "user":
            raise ValueError("the last message must be the user's")
        return messages

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


def _kind_of_prompt(prompt: Any) -> str:
    """Return the kind of a prompt by its first value, so that only one kind is looked for in it."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else ""
    return "texts" if isinstance(first, str) else "rows" if isinstance(first, list) else "ids"


class Completion(Asked):
    """A request to /v1/completions."""

    prompt: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[Several[str], Tag("texts")]
        | Annotated[Several[Token], Tag("ids")]
        | Annotated[Several[Several[Token]], Tag("rows")],
        Discriminator(_kind_of_prompt),
    ]

    @property
    def prompts(self) -> list[Any]:
        """Prompts, each a text or ids."""
        prompt = self.prompt
        is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        return [prompt] if is_one else list(prompt)

    @property
    def most_tokens(self) -> int:
        return self.max_tokens or 16  # as OpenAI's API has it


@dataclass(frozen=True)
class Sent:
    """Information in the headers of a request about how it was sent."""

    session: str | None = None
    key: str = ""  # the same if it is sent again
    is_retry: bool = False  # OpenAI's client says so

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> "Sent":
        """Return the information in headers with lower-case names; RequestError for a long key."""
        key = headers.get("idempotency-key", "")
        if len(key) > _LONGEST_KEY or not key.isprintable():
            raise RequestError(f"an Idempotency-Key has at most {_LONGEST_KEY} plain characters")
        is_retry = headers.get("x-stainless-retry-count", "0") != "0"
        return cls(headers.get("x-session-id"), key, is_retry)


def parsed(model: type[M], body: bytes, session: str | None, most_values: int) -> M:
    """A request from its body, and the session that a header names; RequestError, in one line, if
    it is invalid.
    """
    values = values_of(body, most_values)
    if isinstance(values, dict) and values.get("session") is None and session is not None:
        values["session"] = session
    try:
        return model.model_validate(values)
    except RecursionError:
        raise RequestError("the body is nested too deep") from None
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        param = str(fault["loc"][0]) if fault["loc"] else None
        what = fault["msg"].removeprefix("Value error, ")
        raise RequestError(f"{param or 'the body'}: {what}", param=param) from None
