"""Requests that clients really sent to `kvalign serve`, recorded by client and version, sent again.

The answers are read by the types of OpenAI's package, which these clients use or imitate.
"""

import json
from pathlib import Path

import httpx
import pytest
from helpers.patience import PATIENCE_S
from helpers.tool_templates import HERMES_TEMPLATE
from openai.pagination import SyncPage
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

# As it was when the requests were recorded.
TEMPLATE = HERMES_TEMPLATE
SERVED = dict(cache_size=250, max_streams=4, max_new_tokens=44, seed=0)
RECORDED = sorted((Path(__file__).parent / "requests").glob("*.json"))
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WHOLE = {CHAT: ChatCompletion, TEXT: Completion, "/v1/models": SyncPage[Model]}


# litellm's requests have all forms, the others take long.
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(x, id=x.stem, marks=[] if "litellm" in x.stem else pytest.mark.slow)
        for x in RECORDED
    ],
)
def test_recorded_requests_are_answered(path, server):
    with httpx.Client(base_url=server.address, timeout=PATIENCE_S) as client:
        for one in json.loads(path.read_text("utf-8")):
            body = json.dumps(one["body"]) if "body" in one else None
            reply = client.request(one["method"], one["path"], content=body, headers=one["headers"])
            assert reply.status_code == one["status"], f"{one['about']}: {reply.text}"
            assert reply.headers.get("X-KVAlign-Ignored", "") == one.get("ignored", "")
            if one["status"] != 200:
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
                continue
            asked = one.get("body", {})
            whole = in_pieces(one, reply) if asked.get("stream") else reply.json()
            check_calls(asked, WHOLE[one["path"]].model_validate(whole))


def in_pieces(one, reply):
    """The document that a stream brings."""
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    for event in events:
        ChatCompletionChunk.model_validate(event)
    choices = [chunk["choices"][0] for chunk in events if chunk["choices"]]
    has_usage = one["body"].get("stream_options", {}).get("include_usage", False)
    assert bool(events[-1].get("usage")) == has_usage
    message = {"role": "assistant", "content": "", "tool_calls": []}
    for choice in choices:
        message["content"] += choice["delta"].get("content") or ""
        message["tool_calls"] += choice["delta"].get("tool_calls", ())
    last = {**choices[-1], "message": message}
    return {**events[0], "object": "chat.completion", "choices": [last], "usage": None}


def check_calls(asked, told):
    """A tool that must be called is, unless the answer is cut."""
    if asked.get("tool_choice", "auto") == "auto":
        return
    (choice,) = told.choices
    assert choice.message.tool_calls or choice.finish_reason == "length"
    assert choice.finish_reason in ("tool_calls", "length")
