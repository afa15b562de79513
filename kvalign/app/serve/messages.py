"""Messages of a conversation, and the tools that it may use, in the form of OpenAI's API."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.form import Form

MOST_TOOLS = 128
_MOST_PARTS = 256  # of a message


class TextPart(Form):
    harmless: ClassVar = {"prompt_cache_breakpoint": "says where a cached prompt may end"}
    refused: ClassVar = {"image_url": (), "input_audio": (), "file": (), "refusal": ()}
    within = "messages"
    type: Literal["text"]
    text: str


def _an_object(arguments: str) -> str:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("arguments of a call must be the text of a JSON object")
    return json.dumps(value)


Arguments = Annotated[str, AfterValidator(_an_object)]


class CalledFunction(Form):
    within = "messages"
    name: str
    arguments: Arguments


class ToolCall(Form):
    harmless: ClassVar = {"id": "its name", "index": "its place"}
    within = "messages"
    type: Literal["function"]
    function: CalledFunction


class Message(Form):
    """One message; `content` is its text."""

    harmless: ClassVar = {
        "annotations": "links in an answer, which clients send back with it",
        "tool_call_id": "says which call it answers: results are read in the order of the calls",
    }
    refused: ClassVar = {"name": (), "refusal": ("",), "audio": (), "function_call": ()}
    within = "messages"
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS)] | None = None

    @classmethod
    def obeyed(cls, values: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
        """Return the role and the text: text parts are joined by a line end, as vLLM, TensorRT-LLM
        and llama.cpp join them.
        """
        if values.get("role") == "tool":  # as litellm and older clients say what was called
            values = {name: value for name, value in values.items() if name != "name"}
        fields = super().obeyed(values, ignored)
        if fields.get("role") == "developer":
            fields["role"] = "system"
        if fields.get("tool_calls") and fields.get("content") is None:
            fields["content"] = ""
        content = fields.get("content")
        if isinstance(content, list):
            if len(content) > _MOST_PARTS:
                raise RequestError(
                    f"a message has at most {_MOST_PARTS} parts, got {len(content)}",
                    param="messages",
                )
            fields["content"] = "\n".join(
                TextPart.model_validate(part, context={"ignored": ignored}).text for part in content
            )
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


class Function(Form):
    harmless: ClassVar = {"strict": "says that the schema must be obeyed"}
    refused: ClassVar = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
        "output_schema": (),
    }
    within = "tools"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Form):
    within = "tools"
    type: Literal["function"]
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


class NamedTool(Form):
    within = "tool_choice"
    type: Literal["function"]
    function: NamedFunction


class FlatTool(Tool):
    """A tool in the form of /v1/responses, where a function's fields stand beside its type."""

    @classmethod
    def obeyed(cls, values: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
        return super().obeyed(_nested(values), ignored)


class FlatNamedTool(NamedTool):
    """The same of a tool that is named."""

    @classmethod
    def obeyed(cls, values: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
        return super().obeyed(_nested(values), ignored)


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in values.items() if name != "type"}
    return {"type": values.get("type"), "function": function}
