"""/v1/responses of `kvalign serve`, through OpenAI's client."""

import json

import openai
import pytest
from helpers.served import serving

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.responses import ResponseRequest
from kvalign.app.serve.wire import parsed

SERVED = dict(cache_size=48, max_streams=4)
TURNS = ["Who lived there?", "Why?", "Why?"]


def respond(client, said, **more):
    asked = dict(model="gpt2-mini", input=said, max_output_tokens=12, temperature=0)
    return client.responses.create(**{**asked, **more})


def test_responses_are_turns_of_a_session(client):
    last = None
    for turn in TURNS:
        reply = respond(client, turn, previous_response_id=last)
        how = dict(model="gpt2-mini", max_tokens=12, temperature=0)
        how |= dict(extra_body={"session": "beside"})
        said = client.chat.completions.create(messages=[{"role": "user", "content": turn}], **how)
        assert reply.output_text == said.choices[0].message.content
        assert reply.usage.input_tokens == said.usage.prompt_tokens
        assert reply.usage.input_tokens_details.cached_tokens == (
            said.usage.prompt_tokens_details.cached_tokens
        )
        why = reply.incomplete_details.reason
        assert (reply.status, why) == ("incomplete", "max_output_tokens")
        assert reply.previous_response_id == last
        last = reply.id
    assert reply.usage.input_tokens > 48, "longer than the cache"


def test_events_make_the_response(client):
    first = respond(client, "Who?")
    whole = respond(client, "Why?", previous_response_id=first.id)
    begun = respond(client, "Who?")
    events = list(respond(client, "Why?", previous_response_id=begun.id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    begin = ("created", "in_progress", "output_item.added", "content_part.added")
    end = ("output_text.done", "content_part.done", "output_item.done", "incomplete")
    assert kinds[:4] == [f"response.{x}" for x in begin]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert kinds[-4:] == [f"response.{x}" for x in end]
    assert events[0].response.id == events[-1].response.id
    again = respond(client, "When?", previous_response_id=events[-1].response.id)
    assert again.usage.input_tokens > whole.usage.input_tokens


def test_only_the_last_response_goes_on(client):
    first = respond(client, "Who?")
    respond(client, "Why?", previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match="only the last response") as caught:
        respond(client, "When?", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"
    apart = respond(client, "Who?", store=False)
    for unknown in (apart.id, "resp_" + "0" * 32):
        with pytest.raises(openai.BadRequestError, match="only the last response"):
            respond(client, "Why?", previous_response_id=unknown)


@pytest.mark.parametrize("store", [None, False])
def test_all_items_sent_back_go_on_from_what_was_read(store, client):
    """As front ends do, which keep conversations themselves."""
    said = [{"role": "user", "content": "Who was it?"}]
    first = respond(client, said)
    said += [{"role": "assistant", "content": first.output_text}]
    said += [{"role": "user", "content": "Why then?"}]
    one, same = (respond(client, said, store=store) for _ in range(2))
    counts = one.usage.input_tokens_details.cached_tokens, one.usage.input_tokens
    assert first.usage.input_tokens < counts[0] < counts[1]
    assert one.output_text == same.output_text
    # The first response can still be continued by its id, and says the same.
    after = respond(client, "Why then?", previous_response_id=first.id)
    assert (after.output_text, after.usage.input_tokens) == (one.output_text, counts[1])


@pytest.mark.parametrize("evict", ["entries", "turns"])
def test_what_was_read_is_there_after_a_restart(evict, loaded, tmp_path):
    said = [{"role": "user", "content": "Who was it?"}]
    settings = dict(cache_size=48, sessions=tmp_path / "talks", evict=evict)
    with serving(loaded, **settings) as one, one.client() as client:
        first = respond(client, said)
    said += [{"role": "assistant", "content": first.output_text}]
    said += [{"role": "user", "content": "Why then?"}]
    with serving(loaded, **settings) as one, one.client() as client:
        whole = respond(client, said)
        after = respond(client, "Why then?", previous_response_id=first.id)
    assert whole.usage == after.usage and whole.output_text == after.output_text
    num_cached = whole.usage.input_tokens_details.cached_tokens
    assert (num_cached > 0) == (evict == "entries"), "without the first turn the rest is read again"


def test_instructions_are_the_system_prompt(client):
    messages = [{"role": "user", "content": [{"type": "input_text", "text": "Who?"}]}]
    one = respond(client, messages, instructions="Be brief.")
    same = respond(client, [{"role": "developer", "content": "Be brief."}, *messages])
    assert one.output_text == same.output_text
    kept = respond(client, "Why?", previous_response_id=one.id, instructions="Be brief.")
    assert kept.output_text == respond(client, "Why?", previous_response_id=same.id).output_text
    with pytest.raises(openai.BadRequestError, match="do not continue the session"):
        respond(client, "Why?", previous_response_id=kept.id, instructions="Be long.")


def test_a_response_may_be_json(client):
    schema = {"type": "object", "required": ["ok"], "additionalProperties": False}
    schema["properties"] = {"ok": {"type": "boolean"}}
    form = {"format": {"type": "json_schema", "name": "one", "schema": schema, "strict": True}}
    reply = respond(client, "Is it?", text=form, max_output_tokens=40)
    assert reply.status == "completed" and set(json.loads(reply.output_text)) == {"ok"}
    asked = dict(model="gpt2-mini", input="Is it?", text=form, max_output_tokens=40, temperature=0)
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_text == reply.output_text


def test_logprobs_are_told(client):
    asked = dict(include=["message.output_text.logprobs"], top_logprobs=2)
    (part,) = respond(client, "Who?", **asked).output[0].content
    assert len(part.logprobs) == 12 and len(part.logprobs[0].top_logprobs) == 2


@pytest.mark.parametrize(
    ("name", "value"), [("prompt", {"id": "a"}), ("n", 2), ("conversation", "c"), ("session", "a")]
)
def test_what_is_not_supported_is_refused_by_name(name, value):
    body = json.dumps({"model": "m", "input": "Hello", name: value}).encode()
    with pytest.raises(RequestError, match=f"{name} is not supported"):
        parsed(ResponseRequest, body, {})
