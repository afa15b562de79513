"""Tools of /v1/responses, through OpenAI's client."""

import asyncio
import json

import openai
import pytest
from helpers.tool_templates import HERMES_TEMPLATE, TIME, WEATHER

from kvalign.app.serve.reading import Reading
from kvalign.app.serve.replies import Events, parts_of, usage_of
from kvalign.app.serve.responses import ResponseForm, ResponseRequest
from kvalign.app.serve.turn import AnswerPiece, Answers, End
from kvalign.app.serve.wire import parsed
from kvalign.streaming.calls import FORMS

SERVED, TEMPLATE = dict(cache_size=250, max_streams=4), HERMES_TEMPLATE
FLAT = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]
NAMED = {"type": "function", "name": "weather"}
QUESTION = "How warm is it in Rome?"


def respond(client, said=QUESTION, **more):
    asked = dict(model="gpt2-mini", input=said, max_output_tokens=80, temperature=0)
    return client.responses.create(**{**asked, "tools": FLAT, **more})


def read(**fields):
    body = {"model": "m", "input": "Hello", **fields}
    return parsed(ResponseRequest, json.dumps(body).encode(), {})


def test_a_call_and_its_result_are_turns_of_a_session(client):
    first = respond(client, tool_choice=NAMED)
    (call,) = first.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert set(json.loads(call.arguments)) == {"city", "unit"}
    assert first.status == "completed" and first.output_text == ""
    assert first.tool_choice.name == "weather"
    assert [x.name for x in first.tools] == ["weather", "time"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "19"}
    after = respond(client, [result], previous_response_id=first.id, max_output_tokens=4)
    cached = after.usage.input_tokens_details.cached_tokens
    assert cached > first.usage.input_tokens and after.output[0].type == "message"
    # A client that sends all items asks the same as in a chat.
    whole = [{"role": "user", "content": QUESTION}, call.model_dump(exclude_none=True), result]
    apart = respond(client, whole, store=False, max_output_tokens=4)
    function = {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    called = {"role": "assistant", "tool_calls": [{"id": "a", **function}]}
    messages = [whole[0], called, {"role": "tool", "content": "19", "tool_call_id": "a"}]
    how = dict(model="gpt2-mini", tools=[WEATHER, TIME], temperature=0, max_tokens=4)
    said = client.chat.completions.create(messages=messages, **how)
    assert apart.usage.input_tokens == said.usage.prompt_tokens
    assert apart.output_text == said.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="'no' is of no call"):
        respond(client, [{**result, "call_id": "no"}], previous_response_id=after.id)
    # What a user says beside a result is a part of the turn.
    begun = respond(client, tool_choice=NAMED)
    called_id = begun.output[0].call_id
    part = {"type": "input_text", "text": "19"}
    more = [{**result, "call_id": called_id, "output": [part]}, whole[0]]
    beside = respond(client, more, previous_response_id=begun.id, max_output_tokens=4)
    assert beside.usage.input_tokens > after.usage.input_tokens


def told(text, num):
    """Items of an answer, and the events that bring it in pieces of so many characters."""
    answers = Answers(1, READING)
    form, whole = (ResponseForm("m", read(tools=FLAT), answers) for _ in range(2))
    ending = End(0, "stop", 1, 0)

    async def parts_told():
        events = Events()
        for start in range(0, len(text), num):
            events.put_nowait(AnswerPiece(0, text[start : start + num]))
        events.put_nowait(ending)
        return [x async for batch in parts_of(answers, events, asyncio.Event().wait) for x in batch]

    parts = asyncio.run(parts_told())
    sent = form.begin() + "".join(map(form.events_of, parts)) + form.end([ending])
    events = [json.loads(line[6:]) for line in sent.splitlines() if line.startswith("data: ")]
    return whole.whole([parts], usage_of(answers, [ending]))["output"], events


READING = Reading(("<think>", "</think>"), FORMS["hermes"], {"weather": {}, "time": {}})


def plain(items):
    return [{x: y for x, y in item.items() if x not in ("id", "call_id")} for item in items]


ONE = '<tool_call>\n{"name": "time"}\n</tool_call>'


@pytest.mark.parametrize("num", [1, 5, 1000])
@pytest.mark.parametrize(
    "text",
    [
        *("It is < 9.", f"Let me see.\n{ONE}\n{ONE}", ONE, "", "<tool_call>"),
        *(f"<think>Now?\n{ONE} No.</think>\n\nIt is 9.\n{ONE}", "<think>So", "<think>So</think>"),
    ],
)
def test_items_in_pieces_are_the_items(text, num):
    items, events = told(text, num)
    last = events[-1]["response"]["output"]
    assert plain(last) == plain(items)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last
    at = [event["output_index"] for event in events if "output_index" in event]
    assert at == sorted(at), "an item begins when the one before has ended"


def test_items_of_one_answer_are_one_message():
    text = f"<think>When?</think>\n\nLet me see.\n{ONE}\n{ONE}"
    items, _ = told(text, 1000)
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": str(number)}
        for number, item in enumerate(items[2:])
    ]
    asked = {"role": "user", "content": "When?"}
    back = read(input=[asked, *items, *reversed(results)], tools=FLAT)
    _, answer, *results = back.messages
    assert answer == READING.message(text) and answer.reasoning_content == "When?"
    assert [(one.role, one.content) for one in results] == [("tool", "0"), ("tool", "1")]
    two = [{"role": "assistant", "content": text} for text in "ab"]
    apart = read(input=[*two, {"role": "user", "content": "c"}]).messages
    assert [one.content for one in apart] == ["a", "b", "c"]
