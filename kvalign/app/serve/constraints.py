"""Answers in a form that a request gives: JSON, JSON of a schema, or a call of a tool.

llguidance says after each token which ones may follow; all others get no probability. A token that
ends the answer may follow when the form is complete.
"""

import json
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvalign.app.serve.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

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

    def of_schema(self, schema: Mapping[str, Any]) -> Callable[[int], Constraint]:
        """Return what makes the constraint of an answer to so many tokens.

        Args:
            schema: JSON schema of the answer.

        Raises:
            RequestError: a schema that cannot be obeyed, or a server without llguidance.
        """
        text = json.dumps(schema)
        return self._of(
            "response_format",
            lambda matcher: matcher.grammar_from_json_schema(text, overrides=_COMPACT),
        )

    def of_grammar(self, grammar: str, field: str) -> Callable[[int], Constraint]:
        """The same for a grammar in llguidance's form of Lark, which a field of a request asks for.

        Raises:
            RequestError: as of `of_schema`.
        """
        return self._of(field, lambda matcher: matcher.grammar_from_lark(grammar))

    def _of(
        self, field: str, grammar_by: "Callable[[type[LLMatcher]], str]"
    ) -> Callable[[int], Constraint]:
        def refusal(what: str) -> RequestError:
            return RequestError(f"{field} {what}", param=field, code="unsupported")

        try:
            from llguidance import LLMatcher
        except ImportError:
            raise refusal("is not supported by this server, which lacks llguidance") from None
        if not self._ends:
            raise refusal("is not supported: no token of this model ends an answer")
        try:
            grammar = grammar_by(LLMatcher)
            fault = LLMatcher.validate_grammar(grammar, self._tokenizer)
        except ValueError as error:
            fault = str(error)
        if fault:
            raise refusal(f"has a schema that cannot be obeyed: {' '.join(fault.split()):.300}")
        return lambda num_before: Constraint(LLMatcher(self._tokenizer, grammar), num_before)

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._own, n_vocab=len(self._own), eos_token=self._ends)
