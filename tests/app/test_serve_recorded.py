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
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

# As it was when the requests were recorded.
TEMPLATE = HERMES_TEMPLATE
SERVED = dict(cache_size=250, max_streams=4, max_new_tokens=44, seed=0)
RECORDED = sorted((Path(__file__).parent / "requests").glob("*.json"))
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
WHOLE = {CHAT: ChatCompletion, TEXT: Completion, RESPONSES: Response, "/v1/models": SyncPage[Model]}
CHUNK = {CHAT: TypeAdapter(ChatCompletionChunk), RESPONSES: TypeAdapter(ResponseStreamEvent)}


# litellm's requests have all forms, the others take long.
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(x, id=x.stem, marks=[] if "litellm" in x.stem else pytest.mark.slow)
        for x in RECORDED
    ],
)
def test_recorded_requests_are_answered(path, server):
    last, call = "", ""
    with httpx.Client(base_url=server.address, timeout=PATIENCE_S) as client:
        for one in json.loads(path.read_text("utf-8")):
            body = json.dumps(one["body"]).replace("LAST", last) if "body" in one else None
            if body and '"CALL"' in body:  # of the last response, unless that was cut
                if not call:
                    continue
                body = body.replace('"CALL"', f'"{call}"')
            reply = client.request(one["method"], one["path"], content=body, headers=one["headers"])
            assert reply.status_code == one["status"], f"{one['about']}: {reply.text}"
            assert reply.headers.get("X-KVAlign-Ignored", "") == one.get("ignored", "")
            if one["status"] != 200:
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
                continue
            asked = one.get("body", {})
            whole = in_pieces(one, reply) if asked.get("stream") else reply.json()
            told = WHOLE[one["path"]].model_validate(whole)
            if one["path"] == RESPONSES:
                last = told.id
                call = next((x.call_id for x in told.output if x.type == "function_call"), call)
            check_calls(asked, told)


def in_pieces(one, reply):
    """The document that a stream brings."""
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    if one["path"] == CHAT:
        assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    for event in events:
        CHUNK[one["path"]].validate_python(event)
    if one["path"] == RESPONSES:
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        return events[-1]["response"]
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
    if isinstance(told, Response):
        calls = [item for item in told.output if item.type == "function_call"]
        assert calls or told.status == "incomplete"
    else:
        (choice,) = told.choices
        assert choice.message.tool_calls or choice.finish_reason == "length"
        assert choice.finish_reason in ("tool_calls", "length")
