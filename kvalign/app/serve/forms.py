"""Answers in the forms of OpenAI's API."""

import secrets
import time
from typing import Any

from kvalign.app.serve.answers import Answers


class TextForm:
    """Of /v1/completions."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, model: str):
        self.model, self.id = model, self.prefix + secrets.token_hex(12)
        self.created = int(time.time())

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a first chunk, if there is one before the text."""
        return None

    def choice(self, index: int, text: str, finish: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    def piece(self, index: int, text: str, finish: str | None = None) -> dict[str, Any]:
        """The choice of a chunk."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    def whole(self, choices: list[dict], usage: dict) -> dict[str, Any]:
        return {**self._head(self.kind), "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict], **usage: Any) -> dict[str, Any]:
        return {**self._head(self.chunk_kind), "choices": choices, **usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class ChatForm(TextForm):
    """Of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._delta(index, {"role": "assistant", "content": ""}, None)

    def choice(self, index: int, text: str, finish: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}

    def piece(self, index: int, text: str, finish: str | None = None) -> dict[str, Any]:
        return self._delta(index, {"content": text} if text else {}, finish)

    def _delta(self, index: int, delta: dict, finish: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def usage_of(answers: Answers, num_tokens: int) -> dict[str, Any]:
    """The tokens of a request; `cached_tokens` are those of its session."""
    return {
        "prompt_tokens": answers.num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": answers.num_prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": answers.num_cached},
    }
