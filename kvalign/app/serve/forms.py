"""Forms of answers: calls of tools that are required, and JSON. A constraint lets only the asked
form through: llguidance says after each token which ones may follow; all others get no probability.
A token that ends the answer may follow when the form is complete.

llguidance takes each added token of the form `<...>` for a special one, which no text contains. So
a mark that is a token stands in a grammar by its id.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.wire import ChatRequest
from kvalign.models.input_ids import num_ids
from kvalign.streaming.calls import CallForm
from kvalign.streaming.template import Dialect

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# JSON as templates write it: a blank after each comma and colon, no other.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class ToolSet:
    """Tools of one request."""

    definitions: Sequence[Mapping[str, Any]]
    must: Sequence[str]  # names, one of which is called; empty: the model may choose
    strict: Collection[str]  # names whose arguments obey their schemas in any case
    form: CallForm | None  # in which the model writes a call; None: no call is looked for

    @classmethod
    def of(cls, request: ChatRequest, tokenizer: PreTrainedTokenizerBase) -> "ToolSet | None":
        """The tools of a request, None if it has none.

        Raises:
            RequestError: the model has no chat template, or a call is required whose form is not
                known, or is strict and has no mark.
        """
        if not request.tools:
            return None
        if not tokenizer.chat_template:
            what = (
                "tools is not supported: this model has no chat template; switch the client's off"
            )
            raise RequestError(what, param="tools", code="unsupported")
        form, must = Dialect.of(tokenizer).form, request.must_call
        if must and form is None:
            what = "tool_choice: none can be required, as this template's form of a call is unknown"
            raise RequestError(what, param="tool_choice", code="unsupported")
        strict = {tool.name for tool in request.tools if tool.strict and request.may_call}
        if strict and not must and not (form and form.begin in tokenizer.get_added_vocab()):
            what = "tools: strict is not supported, as no token begins a call: require one instead"
            raise RequestError(what, param="tools", code="unsupported")
        definitions = [tool.for_template() for tool in request.tools]
        return cls(definitions, must, strict, form if request.may_call else None)

    @property
    def parameters(self) -> dict[str, Mapping[str, Any]]:
        """Schemas of the parameters, by the tools' names."""
        functions = (tool["function"] for tool in self.definitions)
        return {one["name"]: one.get("parameters") or _NO_ARGUMENTS for one in functions}

    def grammar(self, literal: Callable[[str], str]) -> str:
        """Rule `whole` of an answer in llguidance's form of Lark, in which `literal` writes a text:
        one call; or any tokens, of which the mark of a call begins one.
        """
        assert self.form is not None
        rules, calls = list[str](), list[str]()
        for number, name in enumerate(self.must or self.parameters):
            head, tail = self.form.text(name, "\0").split("\0")
            is_free = not self.must and name not in self.strict
            schema = {"type": "object"} if is_free else self.parameters[name]
            schema = {**schema, "x-guidance": _WRITTEN}
            calls.append(f"{literal(head)} arguments{number} {literal(tail)}")
            rules.append(f"arguments{number}: %json {json.dumps(schema)}")
        whole = "call"
        if not self.must:
            whole = "(call | other)*"
            rules.append(f"other: {literal(self.form.begin).replace('<[', '<[^')}")
        return "\n".join([f"whole: {whole}", f"call: {' | '.join(calls)}", *rules])


_COMPACT: Any = {"whitespace_flexible": False}  # a small model may write blanks without end


class Constraint(transformers.LogitsProcessor):
    """Form of one answer, which begins after `num_before` tokens and which `field` asks for."""

    def __init__(self, matcher: "LLMatcher", num_before: int, field: str):
        self._matcher, self._num_read, self._field = matcher, num_before, field

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] after ids [1, T], which go on those of the last call."""
        self._matcher.consume_tokens(input_ids[0, self._num_read :].tolist())
        self._num_read = input_ids.shape[1]
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            what = f"{self._field} has a schema that allows nothing that goes on as an answer began"
            raise RequestError(what, param=self._field, code="unsupported")
        bits = np.unpackbits(words, bitorder="little")[: scores.shape[1]]
        allowed = torch.zeros(scores.shape[1], dtype=torch.bool)
        allowed[: len(bits)] = torch.from_numpy(bits).bool()
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)


class Constraints:
    """Forms of answers of one tokenizer, whose answers end with one of `ends`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]):
        self._own, self._ends = tokenizer, [*ends]

    def of(
        self, form: Mapping[str, Any] | ToolSet, field: str, before: str = ""
    ) -> Callable[[int], Constraint]:
        """Return what makes the constraint of an answer to so many tokens.

        Args:
            form: JSON schema of the answer, or tools, one of which it calls.
            field: of a request, which asks for it.
            before: text with which the answer begins.

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
        if isinstance(form, ToolSet):
            rules = form.grammar(self._literal)
        else:
            rules = f"whole: %json {json.dumps({**form, 'x-guidance': _COMPACT})}"
        try:
            grammar = LLMatcher.grammar_from_lark(f"start: {self._literal(before)} whole\n{rules}")
            fault = LLMatcher.validate_grammar(grammar, self._tokenizer)
        except ValueError as error:
            fault = str(error)
        if not fault:
            matcher = LLMatcher(self._tokenizer, grammar)
            matcher.compute_bitmask()  # of a schema that refers to itself alone there is none
            fault = "no value obeys it" if matcher.is_error() else ""
        if fault:
            raise refusal(f"has a schema that cannot be obeyed: {' '.join(fault.split()):.300}")
        return lambda num: Constraint(LLMatcher(self._tokenizer, grammar), num, field)

    def _literal(self, text: str) -> str:
        added = self._own.get_added_vocab()
        marks = "|".join(re.escape(one) for one in sorted(added, key=len, reverse=True))
        pieces = re.split(f"({marks})", text) if marks else [text]
        return " ".join(f"<[{added[x]}]>" if x in added else json.dumps(x) for x in pieces if x)

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._own, n_vocab=num_ids(self._own), eos_token=self._ends)
