"""Messages of a conversation, and the tools that it may use, in the forms of OpenAI's API: those of
chats, and the items of responses.
"""

import json
from collections.abc import Collection, Iterable
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
)

from kvalign.app.serve.form import Form, unsupported

MOST_TOOLS = 128
_MOST_PARTS = 256  # of a message


class TextPart(Form):
    harmless: ClassVar = ("prompt_cache_breakpoint", "annotations", "logprobs")
    within = "content"
    type: Literal["text", "input_text", "output_text"]
    text: str


def _joined(content: Any, info: ValidationInfo) -> Any:
    """The text of a message: its parts are joined by a line end, as vLLM, TensorRT-LLM and
    llama.cpp join them.
    """
    if not isinstance(content, list):
        return content
    if len(content) > _MOST_PARTS:
        raise ValueError(f"a message has at most {_MOST_PARTS} parts, got {len(content)}")
    try:
        parts = [TextPart.model_validate(part, context=info.context) for part in content]
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from None
    return "\n".join(part.text for part in parts)


def _an_object(arguments: str) -> str:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("arguments of a call must be the text of a JSON object")
    return json.dumps(value)


Text = Annotated[str, BeforeValidator(_joined)]
Arguments = Annotated[str, AfterValidator(_an_object)]


class CalledFunction(Form):
    within = "messages"
    name: str
    arguments: Arguments


class ToolCall(Form):
    harmless: ClassVar = ("id", "index")
    within = "messages"
    type: Literal["function"]
    function: CalledFunction


class Message(Form):
    """One message; `content` is its text. Results of calls are read in the order of the calls."""

    harmless: ClassVar[Collection[str]] = ("annotations", "tool_call_id")
    within = "messages"
    role: Literal["system", "user", "assistant", "tool"]
    content: Text
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS)] | None = None

    @classmethod
    def obeyed(cls, values: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
        if values.get("role") == "tool":  # as litellm and older clients say what was called
            values = {name: value for name, value in values.items() if name != "name"}
        fields = super().obeyed(values, ignored)
        if fields.get("role") == "developer":
            fields["role"] = "system"
        if fields.get("tool_calls") and fields.get("content") is None:
            fields["content"] = ""
        return fields

    @property
    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """Names and arguments of its calls."""
        functions = [call.function for call in self.tool_calls or ()]
        return [(one.name, json.loads(one.arguments)) for one in functions]

    def for_template(self) -> dict[str, Any]:
        """The message as a chat template takes it."""
        calls = [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in self.calls
        ]
        own: dict[str, Any] = {"role": self.role, "content": self.content}
        return {**own, "tool_calls": calls} if calls else own


class Item(Message):
    """An item of /v1/responses, read as the message that it is: one, a call that an answer has, or
    the result of a call. Results are read in the order of the calls.
    """

    harmless: ClassVar = (*Message.harmless, "id", "status", "phase", "call_id")
    within = "input"

    @classmethod
    def obeyed(cls, values: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
        values = dict(values)
        kind = values.pop("type", "message")
        if kind == "function_call":
            function = {name: values.pop(name) for name in ("name", "arguments") if name in values}
            call = {"type": "function", "function": function}
            values |= {"role": "assistant", "content": "", "tool_calls": [call]}
        elif kind == "function_call_output":
            values |= {"role": "tool", "content": values.pop("output", None)}
        elif kind != "message":
            raise unsupported(f"input: an item of the type {kind!r:.80}", "input")
        return super().obeyed(values, ignored)


def messages_of(items: Iterable[Message]) -> list[Message]:
    """The messages that items are. An answer comes in several of them, its text and its calls; it
    is one message.
    """
    messages = list[Message]()
    for role, run in groupby(items, key=lambda message: message.role):
        several = list(run)
        calls = [call for message in several for call in message.tool_calls or ()]
        if role == "assistant" and calls:
            content = "".join(message.content for message in several)
            several = [Message(role=role, content=content, tool_calls=calls)]
        messages += several
    return messages


class OfFunction(Form):
    """A tool, or its name. In /v1/responses the function's fields stand beside the type."""

    type: Literal["function"]

    @classmethod
    def obeyed(cls, values: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
        if "function" not in values:
            function = {name: value for name, value in values.items() if name != "type"}
            values = {"type": values.get("type"), "function": function}
        return super().obeyed(values, ignored)


class Function(Form):
    harmless: ClassVar = ("strict",)
    within = "tools"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(OfFunction):
    within = "tools"
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as a chat template takes it."""
        own = self.function
        parameters = own.parameters or {"type": "object", "properties": {}}
        about = {"description": own.description or "", "parameters": parameters}
        return {"type": "function", "function": {"name": own.name, **about}}


class NamedFunction(Form):
    within = "tool_choice"
    name: str


class NamedTool(OfFunction):
    within = "tool_choice"
    function: NamedFunction
