"""Logprobs of `kvalign serve`, and answers that are JSON."""

import json
import sys

import openai
import pytest
import torch

from kvalign.streaming.answer import token_bytes

SERVED = dict(cache_size=64, max_streams=4)
HELLO = [{"role": "user", "content": "Who lived there?"}]
SCHEMA = {"type": "object", "required": ["ok", "kind"], "additionalProperties": False}
SCHEMA["properties"] = {"ok": {"type": "boolean"}, "kind": {"enum": ["sea", "land"]}}
OF_SCHEMA = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA}}


def ask(client, **more):
    asked = dict(model="gpt2-mini", messages=HELLO, max_tokens=12, temperature=0)
    return client.chat.completions.create(**{**asked, **more})


def test_logprobs_are_the_model_s(client, loaded):
    prompt = "The history of the"
    reply = client.completions.create(
        model="gpt2-mini", prompt=prompt, max_tokens=5, logprobs=2, seed=1, temperature=0.5
    ).choices[0]
    ids = loaded.tokenizer(prompt)["input_ids"]
    told = reply.logprobs
    for name, value, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        with torch.no_grad():
            logprobs = loaded.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        spelled = {
            token_bytes(loaded.tokenizer, i).decode(errors="replace"): i for i in range(8192)
        }
        assert value == pytest.approx(float(logprobs[spelled[name]]), abs=1e-4)
        assert max(top.values()) == pytest.approx(float(logprobs.max()), abs=1e-4)
        ids.append(spelled[name])
    assert "".join(reply.logprobs.tokens) == reply.text
    assert reply.logprobs.text_offset[:2] == [0, len(reply.logprobs.tokens[0])]


def test_logprobs_of_pieces_are_those_of_the_whole(client):
    how = dict(logprobs=True, top_logprobs=3)
    whole = ask(client, **how).choices[0]
    pieces = [chunk.choices[0] for chunk in ask(client, **how, stream=True) if chunk.choices]
    streamed = [one for piece in pieces if piece.logprobs for one in piece.logprobs.content]
    assert streamed == whole.logprobs.content and len(streamed) == 12
    assert all(one.token == one.top_logprobs[0].token for one in streamed)
    assert b"".join(bytes(x.bytes) for x in streamed).decode() == whole.message.content
    assert (pieces[0].delta.role, pieces[-1].finish_reason) == ("assistant", "length")
    assert ask(client).choices[0].logprobs is None


def test_logprobs_of_an_answer_of_before_are_not_invented(client):
    name = dict(extra_body={"session": "told"})
    first = ask(client, logprobs=True, **name).choices[0]
    assert ask(client, logprobs=True, **name).choices[0] == first, "answered anew"
    retried = name | dict(extra_headers={"X-Stainless-Retry-Count": "1"})
    messages = [{"role": "user", "content": "And then?"}]
    ask(client, messages=messages, logprobs=True, **name)
    with pytest.raises(openai.BadRequestError, match="are not stored"):
        ask(client, messages=messages, logprobs=True, **retried)


@pytest.mark.parametrize(("seed", "more"), [(0, {}), (1, dict(session="forms"))])
def test_an_answer_of_a_schema_is_one(client, seed, more):
    how = dict(response_format=OF_SCHEMA, max_tokens=60, temperature=1.5, seed=seed)
    choice = ask(client, **how, extra_body=more).choices[0]
    answer = json.loads(choice.message.content)
    assert choice.finish_reason == "stop"
    assert set(answer) == {"ok", "kind"} and answer["kind"] in ("sea", "land")


def test_a_schema_that_cannot_be_obeyed_is_refused(client):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}
    with pytest.raises(openai.BadRequestError, match="schema that cannot be obeyed"):
        ask(client, response_format=schema)


def test_without_the_package_json_is_refused_by_name(client, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(openai.BadRequestError, match="response_format is not supported"):
        ask(client, response_format={"type": "json_object"})
