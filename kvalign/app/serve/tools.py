"""Tools: functions that a model may ask its client to call.

The chat template tells the model of a request's tools. The model writes a call as its template
does, which is one of two forms. A call of any other form stays text.

    <tool_call>                                  Hermes, Qwen, SmolLM3
    {"name": "f", "arguments": {...}}
    </tool_call>

    {"name": "f", "parameters": {...}}           Llama 3: the whole answer
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.messages import Message
from kvalign.app.serve.wire import Chat
from kvalign.streaming.turns import call_text


class CallForm(NamedTuple):
    """Form of a call: JSON with a name and, under `key`, arguments, between two marks."""

    begin: str
    end: str
    key: str


HERMES = CallForm("<tool_call>", "</tool_call>", "arguments")
LLAMA = CallForm("", "", "parameters")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# JSON as templates write it: a blank after each comma and colon, no other.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def form_of(tokenizer: PreTrainedTokenizerBase) -> CallForm | None:
    """Form in which the chat template of a model writes a call; None: another one.

    Raises:
        RequestError: the template takes no tools.
    """
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
    if not (text := call_text(tokenizer, call)):
        raise RequestError(
            "tools is not supported: the chat template of this model takes none; switch off those "
            "of the client",
            param="tools",
            code="unsupported",
        )
    is_shown = not {HERMES.begin, HERMES.end} & {*tokenizer.all_special_tokens}
    if is_shown and HERMES.begin in text and HERMES.end in text:
        return HERMES
    return LLAMA if f'"{LLAMA.key}": {{"x": "y"}}' in text else None


class Call(NamedTuple):
    name: str
    arguments: str  # JSON


class CallReader:
    """Reader of an answer that comes in pieces: its content, and the calls in it."""

    def __init__(self, form: CallForm, names: Sequence[str]):
        self._form, self._names = form, names
        self._tail, self._blank = "", ""  # what may begin a call, and the blank before one
        self._is_call, self._is_text, self._has_calls = not form.begin, False, False

    def read(self, piece: str) -> tuple[str, list[Call]]:
        """Return the content and the calls that are complete now."""
        self._tail += piece
        if not self._form.begin:  # an answer that does not begin as JSON is no call
            self._is_text |= self._tail.lstrip()[:1] not in ("", "{")
            return (self._take(len(self._tail)), []) if self._is_text else ("", [])
        content, calls = "", list[Call]()
        while True:
            mark = self._form.end if self._is_call else self._form.begin
            start = self._tail.find(mark)
            if start < 0:
                break
            inner = self._take(start + len(mark))[:start]
            if not self._is_call:
                content += (text := inner.rstrip())
                self._blank = inner[len(text) :]
            elif call := self._call(inner):
                calls.append(call)
            else:
                content += f"{self._blank}{self._form.begin}{inner}{mark}"
            self._is_call = not self._is_call
        if not self._is_call:
            content += self._take(self._num_sure())
        return content, calls

    def rest(self) -> tuple[str, list[Call]]:
        """Return what has been held back, when no more comes."""
        text = self._take(len(self._tail))
        if not self._is_call or self._is_text:
            return (text.rstrip() if self._has_calls else text), []
        call = self._call(text)
        return ("", [call]) if call else (f"{self._blank}{self._form.begin}{text}", [])

    def _take(self, num: int) -> str:
        text, self._tail = self._tail[:num], self._tail[num:]
        return text

    def _num_sure(self) -> int:
        """Characters that begin no call, and no blank before one."""
        text, mark = self._tail, self._form.begin
        starts = range(max(0, len(text) - len(mark) + 1), len(text))
        num = next((start for start in starts if mark.startswith(text[start:])), len(text))
        return len(text[:num].rstrip())

    def _call(self, text: str) -> Call | None:
        """The call that a text is, if it is one of a known tool."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get(self._form.key, {})
        if not isinstance(arguments, dict):
            return None
        self._has_calls = True
        return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


@dataclass(frozen=True)
class Tools:
    """Tools of one request, in the form that a model's template has for calls."""

    definitions: Sequence[Mapping[str, Any]]
    must: Sequence[str]  # names, one of which is called; empty: the model may choose
    form: CallForm | None  # None: no call is looked for

    @classmethod
    def of(cls, request: Chat, tokenizer: PreTrainedTokenizerBase) -> "Tools | None":
        """The tools of a request, None if it has none; RequestError if the model takes none."""
        if not request.tools:
            return None
        form, must = form_of(tokenizer), request.must_call
        if must and form is None:
            raise RequestError(
                "tool_choice: how this model's chat template writes a call is not known, so none "
                "can be required",
                param="tool_choice",
                code="unsupported",
            )
        definitions = [tool.for_template() for tool in request.tools]
        return cls(definitions, must, form if request.may_call else None)

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.definitions]

    def reader(self) -> CallReader | None:
        """Reader of one answer; None: no call is looked for in it."""
        return CallReader(self.form, self.names) if self.form else None

    def read(self, text: str) -> tuple[str, list[Call]]:
        """The content of a whole answer, and the calls in it."""
        if (reader := self.reader()) is None:
            return text, []
        (content, calls), (rest, last) = reader.read(text), reader.rest()
        return content + rest, [*calls, *last]

    def message(self, text: str) -> Message:
        """A whole answer as the message that clients send back."""
        content, calls = self.read(text)
        fields = {"tool_calls": [as_json(call) for call in calls]} if calls else {}
        return Message.model_validate({"role": "assistant", "content": content, **fields})

    @property
    def grammar(self) -> str:
        """Grammar of an answer that is one call, in llguidance's form of Lark."""
        assert self.form is not None
        begin, end, key = self.form
        functions = [tool["function"] for tool in self.definitions]
        rules, calls = list[str](), list[str]()
        for number, function in enumerate(functions):
            if function["name"] not in self.must:
                continue
            schema = function.get("parameters") or _NO_ARGUMENTS
            head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
            calls.append(f"call{number}")
            rules.append(f'call{number}: {json.dumps(head)} arguments{number} "}}"')
            rules.append(
                f"arguments{number}: %json {json.dumps({**schema, 'x-guidance': _WRITTEN})}"
            )
        first, last = (f"{begin}\n", f"\n{end}") if begin else ("", "")
        marks = [json.dumps(first)] * bool(begin), [json.dumps(last)] * bool(end)
        whole = " ".join([*marks[0], f"({' | '.join(calls)})", *marks[1]])
        return "\n".join([f"start: {whole}", *rules])


def as_json(call: Call) -> dict[str, Any]:
    """A call with an id of its own, as OpenAI's API has it."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
