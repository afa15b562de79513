"""Forms of answers: calls of tools, and JSON. A constraint lets only the asked form through.

The chat template tells the model of a request's tools, which are functions that the model may ask
its client to call. The model writes a call as its template does, which is one of two forms. A call
of any other form stays text.

    <tool_call>                                  Hermes, Qwen, SmolLM3
    {"name": "f", "arguments": {...}}
    </tool_call>

    {"name": "f", "parameters": {...}}           Llama 3: the whole answer

Where a form is required, llguidance says after each token which ones may follow; all others get no
probability. A token that ends the answer may follow when the form is complete.
"""

import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.messages import Message
from kvalign.app.serve.wire import Chat
from kvalign.models.input_ids import num_ids
from kvalign.streaming.turns import call_text

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


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

    def reader(self) -> CallReader | None:
        """Reader of one answer; None: no call is looked for in it."""
        names = [tool["function"]["name"] for tool in self.definitions]
        return CallReader(self.form, names) if self.form else None

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
        rules, calls = list[str](), list[str]()
        for number, tool in enumerate(self.definitions):
            function = tool["function"]
            if function["name"] not in self.must:
                continue
            schema = function.get("parameters") or _NO_ARGUMENTS
            head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
            calls.append(f"call{number}")
            rules.append(f'call{number}: {json.dumps(head)} arguments{number} "}}"')
            rules.append(
                f"arguments{number}: %json {json.dumps({**schema, 'x-guidance': _WRITTEN})}"
            )
        whole = f"({' | '.join(calls)})"
        if begin:
            first, last = json.dumps(f"{begin}\n"), json.dumps(f"\n{end}")
            whole = f"{first} {whole} {last}"
        return "\n".join([f"start: {whole}", *rules])


def as_json(call: Call) -> dict[str, Any]:
    """A call with an id of its own, as OpenAI's API has it."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


_COMPACT: Any = {"whitespace_flexible": False}  # a small model may write blanks without end


class Constraint(transformers.LogitsProcessor):
    """Form of one answer, which begins after `num_before` tokens."""

    def __init__(self, matcher: "LLMatcher", num_before: int):
        self._matcher, self._num_read = matcher, num_before

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] after ids [1, T], which go on those of the last call."""
        self._matcher.consume_tokens(input_ids[0, self._num_read :].tolist())
        self._num_read = input_ids.shape[1]
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise RuntimeError(self._matcher.get_error())
        bits = np.unpackbits(words, bitorder="little")[: scores.shape[1]]
        allowed = torch.zeros(scores.shape[1], dtype=torch.bool)
        allowed[: len(bits)] = torch.from_numpy(bits).bool()
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)


class Constraints:
    """Forms of answers of one tokenizer, whose answers end with one of `ends`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]):
        self._own, self._ends = tokenizer, [*ends]

    def of(self, form: Mapping[str, Any] | str, field: str) -> Callable[[int], Constraint]:
        """Return what makes the constraint of an answer to so many tokens.

        Args:
            form: JSON schema of the answer, or a grammar in llguidance's form of Lark.
            field: of a request, which asks for it.

        Raises:
            RequestError: a schema that cannot be obeyed, or a server without llguidance.
        """

        def refusal(what: str) -> RequestError:
            return RequestError(f"{field} {what}", param=field, code="unsupported")

        try:
            from llguidance import LLMatcher
        except ImportError:
            raise refusal("is not supported by this server, which lacks llguidance") from None
        if not self._ends:
            raise refusal("is not supported: no token of this model ends an answer")
        try:
            if isinstance(form, str):
                grammar = LLMatcher.grammar_from_lark(form)
            else:
                schema = json.dumps(form)
                grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_COMPACT)
            fault = LLMatcher.validate_grammar(grammar, self._tokenizer)
        except ValueError as error:
            fault = str(error)
        if fault:
            raise refusal(f"has a schema that cannot be obeyed: {' '.join(fault.split()):.300}")
        return lambda num_before: Constraint(LLMatcher(self._tokenizer, grammar), num_before)

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._own, n_vocab=num_ids(self._own), eos_token=self._ends)
