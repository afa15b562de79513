"""Items of the input of /v1/responses, and the messages that they are."""

from collections.abc import Iterable
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.form import Form
from kvalign.app.serve.messages import Arguments, CalledFunction, Message, ToolCall

_LABELS = {"id": "its name", "status": "whether it was complete"}
_OF_CALLS: dict[str, tuple[Any, ...]] = {"caller": ({"type": "direct"},), "namespace": ()}


class Part(Form):
    harmless: ClassVar = {
        "annotations": "links in an answer",
        "logprobs": "sent back with an answer",
    }
    refused: ClassVar = {"image_url": (), "file_id": (), "file_data": (), "detail": ()}
    within = "input"
    type: Literal["input_text", "output_text"]
    text: str


Content = str | Annotated[list[Part], Field(max_length=256)]


class MessageItem(Form):
    harmless: ClassVar = {**_LABELS, "phase": "a label"}
    within = "input"
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    @property
    def message(self) -> Message:
        role = "system" if self.role == "developer" else self.role
        return Message(role=role, content=_text(self.content))


class CallItem(Form):
    """Call of a function, in an answer that a client sends back."""

    harmless: ClassVar = {**_LABELS, "call_id": "says which result is its own"}
    refused: ClassVar = {**_OF_CALLS, "async": (False,)}
    within = "input"
    type: Literal["function_call"]
    name: str
    arguments: Arguments

    @property
    def message(self) -> Message:
        function = CalledFunction(name=self.name, arguments=self.arguments)
        call = ToolCall(type="function", function=function)
        return Message(role="assistant", content="", tool_calls=[call])


class ResultItem(Form):
    """Result of a call."""

    harmless: ClassVar = {
        **_LABELS,
        "call_id": "says which call it answers: results are read in the order of the calls",
        "name": "says what was called",
    }
    refused: ClassVar = _OF_CALLS
    within = "input"
    type: Literal["function_call_output"]
    output: Content

    @property
    def message(self) -> Message:
        return Message(role="tool", content=_text(self.output))


_KINDS = ("message", "function_call", "function_call_output")


def _kind_of(item: Any) -> str:
    kind = item.get("type", _KINDS[0]) if isinstance(item, dict) else _KINDS[0]
    if kind in _KINDS:
        return kind
    raise RequestError(
        f"input: an item of the type {kind!r:.80} is not supported: leave it out",
        param="input",
        code="unsupported",
    )


Item = Annotated[
    Annotated[MessageItem, Tag(_KINDS[0])]
    | Annotated[CallItem, Tag(_KINDS[1])]
    | Annotated[ResultItem, Tag(_KINDS[2])],
    Discriminator(_kind_of),
]


def messages_of(items: Iterable[MessageItem | CallItem | ResultItem]) -> list[Message]:
    """The messages that items are. An answer comes in several of them, its text and its calls; it
    is one message.
    """
    messages = list[Message]()
    parts = [item.message for item in items]
    for role, run in groupby(parts, key=lambda message: message.role):
        several = list(run)
        calls = [call for message in several for call in message.tool_calls or ()]
        if role == "assistant" and calls:
            content = "".join(message.content for message in several)
            several = [Message(role=role, content=content, tool_calls=calls)]
        messages += several
    return messages


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
