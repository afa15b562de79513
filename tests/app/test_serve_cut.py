"""Answers that are cut, by a client or by max_tokens, and go on."""

import json

import httpx
import pytest
from helpers.patience import PATIENCE_S
from helpers.served import serving

MODEL = "gpt2-mini"
HELLO = [{"role": "user", "content": "Who lived on the island ?"}]
SERVED = dict(cache_size=48, method="streaming-llm")


def request_of(messages, session="a", **more):
    asked = dict(model=MODEL, messages=messages, session=session, temperature=0)
    return asked | more


def post(server, messages, session="a", **more):
    address = f"{server.address}/v1/chat/completions"
    asked = request_of(messages, session, **more)
    return httpx.post(address, json=asked, timeout=PATIENCE_S)


def said(reply):
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return choice["message"]["content"], choice["finish_reason"]


def with_answer(*texts):
    return [*HELLO, {"role": "assistant", "content": "".join(texts)}]


def stop(server, session="a"):
    return httpx.post(f"{server.address}/v1/sessions/{session}/stop", timeout=PATIENCE_S)


def test_an_answer_that_was_cut_goes_on(loaded, tmp_path):
    """A session in three parts, with a restart in between, has the tokens of one in one part."""
    how = SERVED | dict(sessions=tmp_path)
    with serving(loaded, **how) as server:
        whole, _ = said(post(server, HELLO, "whole", max_tokens=30))
        ids = server.service.sessions.known("whole").ids.tolist()
        first, finish = said(post(server, HELLO, max_tokens=8))
        assert finish == "length"
        more = dict(continue_final_message=True)
        second, _ = said(post(server, with_answer(first), max_tokens=10, **more))
    with serving(loaded, **how) as server:
        rest = post(server, with_answer(first, second), max_tokens=12, **more)
        third, _ = said(rest)
        usage = rest.json()["usage"]
        assert usage["prompt_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] + 1
        assert first + second + third == whole
        assert server.service.sessions.known("a").ids.tolist() == ids
        assert said(post(server, HELLO, max_tokens=30))[0] == whole, "its last turn is asked again"
        asked = [*with_answer(whole), *HELLO]
        assert said(post(server, asked, max_tokens=5)) == said(
            post(server, asked, "whole", max_tokens=5)
        )


def test_a_client_may_stop_an_answer(loaded):
    with serving(loaded, **SERVED) as server:
        assert stop(server).json()["error"]["code"] == "session_idle"
        address = f"{server.address}/v1/chat/completions"
        asked = request_of(HELLO, stream=True, max_tokens=2000, stop=["never said"])
        pieces, is_stopped, finish = [], False, None
        with httpx.stream("POST", address, json=asked, timeout=PATIENCE_S) as lines:
            for line in lines.iter_lines():
                if not line.startswith("data: {"):
                    continue
                (choice,) = json.loads(line[6:])["choices"]
                pieces.append(choice["delta"].get("content", ""))
                finish = choice["finish_reason"] or finish
                if len(pieces) > 5 and not is_stopped:
                    is_stopped = stop(server).status_code == 200
        text = "".join(pieces)
        assert finish == "length" and is_stopped and text
        session = server.service.sessions.known("a")
        assert session.answer == text and session.num_new < 2000
        assert said(post(server, with_answer(text), max_tokens=3, continue_final_message=True))[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(messages=HELLO, session="a"), "an answer as the last message"),
        (dict(messages=with_answer("x"), session=None), "needs a session"),
        (dict(messages=with_answer("x"), session="a"), "send all messages"),
        (dict(messages=with_answer("x"), session="ended"), "ended by itself"),
        (
            dict(messages=with_answer("x"), session="a", response_format={"type": "json_object"}),
            "not supported with tools and response_format",
        ),
    ],
    ids=str,
)
def test_what_cannot_go_on_is_refused(fields, message, server):
    if fields["session"] == "ended":
        _, finish = said(post(server, HELLO, "ended", max_tokens=40, stop=[" "]))
        assert finish == "stop"
        text = server.service.sessions.known("ended").answer
        fields = fields | dict(messages=with_answer(text))
    reply = post(server, **fields, continue_final_message=True)
    assert reply.status_code == 400 and message in reply.json()["error"]["message"], reply.text
