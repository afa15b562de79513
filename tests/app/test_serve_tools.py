"""Tools of `kvalign serve`: what the template is told, which calls are read, which are required.

Models that are this small call no tool by themselves. So what they write is given here, or required
and then obeys the tool's schema.
"""

import json

import openai
import pytest
from helpers.served import serving
from helpers.tool_templates import TEMPLATES, TIME, WEATHER

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.forms import HERMES, LLAMA, Call, CallReader, Tools, form_of
from kvalign.app.serve.messages import Message
from kvalign.app.serve.sessions import AS_READ, digest
from kvalign.app.serve.wire import Chat
from kvalign.streaming.turns import message_ids, messages_text, opening_len

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ASKED = [{"role": "user", "content": "How warm is it in Rome?"}]
CALL = {"name": "weather", "arguments": '{"city": "Rome", "unit": "C"}'}


def chat(**fields):
    return Chat.model_validate(
        {"model": "m", "messages": ASKED, "tools": [WEATHER, TIME], **fields}
    )


def read(form, *pieces):
    """Content and calls of an answer in pieces, and those pieces of its content."""
    reader, shown, calls = CallReader(form, ["weather", "time"]), [], []
    for text, more in [*map(reader.read, pieces), reader.rest()]:
        shown.append(text)
        calls += more
    return "".join(shown), calls


TWO = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time"}\n</tool_call>\n'
)
CALLS = [Call("weather", '{"city": "Rome"}'), Call("time", "{}")]


@pytest.mark.parametrize("num", [1, 3, 7, len(TWO)])
def test_calls_are_read_from_any_pieces(num):
    pieces = [TWO[i : i + num] for i in range(0, len(TWO), num)]
    assert read(HERMES, *pieces) == ("Let me see.", CALLS)


@pytest.mark.parametrize(
    "text",
    [
        "No call < here, nor <tool here.",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "time", "arguments": [1]}</tool_call>',
        "<tool_call>time()</tool_call>",
        "Cut in a <tool_call>\n{",
        " a space at the end ",
    ],
)
def test_what_is_no_call_stays_text(text):
    for pieces in ([text], list(text)):
        assert read(HERMES, *pieces) == (text, [])


def test_a_call_whose_end_is_missing_is_one():
    assert read(HERMES, TWO.rstrip().removesuffix("</tool_call>")) == ("Let me see.", CALLS)


def test_a_whole_answer_of_json_is_a_call_of_llama_3():
    text = ' {"name": "weather", "parameters": {"city": "Rome"}}'
    assert read(LLAMA, *text) == ("", CALLS[:1])
    for plain in ("It is {warm}.", '{"name": "x", "parameters": {}}', "{"):
        assert read(LLAMA, *plain) == (plain, [])


@pytest.fixture(params=TEMPLATES, ids=["hermes", "llama"])
def form(request, loaded):
    """A form of calls, of which the model's template is for a while."""
    loaded.tokenizer.chat_template = TEMPLATES[request.param]
    yield request.param
    loaded.tokenizer.chat_template = None


def test_the_form_is_what_the_template_writes(form, loaded):
    assert form_of(loaded.tokenizer) == form
    loaded.tokenizer.chat_template = (
        TEMPLATES[form].replace("tool_call>", "call>").replace('"parameters": ', '"parameters" : ')
    )
    assert form_of(loaded.tokenizer) is None
    with pytest.raises(RequestError, match="tool_choice: how this model's chat template writes"):
        Tools.of(chat(tool_choice="required"), loaded.tokenizer)
    assert Tools.of(chat(), loaded.tokenizer).read(TWO) == (TWO, [])


@pytest.mark.parametrize("template", [PLAIN, None])
def test_a_template_without_tools_refuses_them(template, loaded):
    loaded.tokenizer.chat_template = template
    with pytest.raises(RequestError, match="^tools is not supported: the chat template") as caught:
        Tools.of(chat(), loaded.tokenizer)
    assert caught.value.param == "tools"
    loaded.tokenizer.chat_template = None


def test_a_conversation_in_parts_is_the_whole(form, loaded):
    """Only new messages are written; calls and results stand in the template's own form."""
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": CALL}],
    }
    talk = [*ASKED, call, {"role": "tool", "content": 'It is "warm"', "tool_call_id": "1"}]
    messages = [Message.model_validate(one).for_template() for one in talk]
    tools = chat().tools
    how = dict(tools=[tool.for_template() for tool in tools])
    whole = messages_text(loaded.tokenizer, messages, goes_on=False, **how)
    assert f'"{form.key}": {{"city": "Rome", "unit": "C"}}' in whole and '"weather"' in whole
    rest = messages_text(loaded.tokenizer, messages[2:], goes_on=True, **how)
    assert whole.endswith(rest) and "warm" in rest and "Rome" not in rest
    opening = opening_len(loaded.tokenizer, None, **how)
    ids = message_ids(loaded.tokenizer, messages, goes_on=False, **how)
    assert '"description"' in loaded.tokenizer.decode(ids[:opening])
    assert opening > 5 * opening_len(loaded.tokenizer, None)


def test_special_tokens_in_tools_and_calls_are_text(form, loaded):
    end = loaded.tokenizer.eos_token
    tool = {"type": "function", "function": {"name": "f", "description": end, "parameters": {}}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": end}}}
    talk = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, *ASKED]
    for special, num in ((False, 0), (True, 2)):
        how = dict(tools=[tool], goes_on=False, special_tokens=special)
        ids = message_ids(loaded.tokenizer, talk, **how)
        assert ids.count(loaded.tokenizer.eos_token_id) == num


def test_an_answer_and_what_a_client_sends_back_are_the_same(loaded):
    """Ids, blanks and the order of arguments make no difference."""
    tools = Tools([WEATHER, TIME], (), HERMES)
    ours = tools.message(TWO.replace('"Rome"', '"Rome", "unit": "C"'))
    functions = [
        {"name": "weather", "arguments": '{"unit":"C","city":"Rome"}'},
        {"name": "time", "arguments": ""},
    ]
    calls = [
        {"id": x, "type": "function", "function": y} for x, y in zip("ab", functions, strict=True)
    ]
    said = {"role": "assistant", "content": "Let me see.", "tool_calls": calls}
    theirs = Message.model_validate(said)
    assert digest("", [ours], AS_READ) == digest("", [theirs], AS_READ)
    plain = Message(role="assistant", content="Let me see.")
    assert digest("", [ours], AS_READ) != digest("", [plain], AS_READ)


@pytest.fixture
def client(form, loaded):
    with serving(loaded, cache_size=250, max_streams=4) as one, one.client() as client:
        yield client


def ask(client, **more):
    asked = dict(model="gpt2-mini", messages=ASKED, tools=[WEATHER, TIME], max_tokens=80)
    return client.chat.completions.create(**{**asked, "temperature": 1.5, "seed": 1, **more})


def test_a_required_call_obeys_its_schema_and_goes_on(client):
    named = {"type": "function", "function": {"name": "weather"}}
    choice = (first := ask(client, tool_choice=named)).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Oslo", "Rome") and arguments["unit"] in ("C", "F")
    chunks = [one.choices[0] for one in ask(client, tool_choice=named, stream=True)]
    (delta,) = [x for one in chunks for x in one.delta.tool_calls or ()]
    assert delta.index == 0 and delta.function.model_dump() == call.function.model_dump()
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(one.delta.content for one in chunks)
    result = {"role": "tool", "tool_call_id": call.id, "content": "19"}
    talk = [*ASKED, choice.message.model_dump(exclude_none=True), result]
    after = ask(client, messages=talk, max_tokens=4)
    assert after.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens
    assert after.choices[0].finish_reason == "length"
    other = ask(client, messages=talk, tools=[WEATHER], max_tokens=4)
    assert other.usage.prompt_tokens_details.cached_tokens == 0  # other tools, another opening


def test_one_of_all_is_called_and_none_where_none_may_be(client):
    names = {
        call.function.name
        for choice in ask(client, tool_choice="required", n=3, seed=2).choices
        for call in choice.message.tool_calls
    }
    assert names <= {"weather", "time"}
    plain = ask(client, tool_choice="none", max_tokens=5).choices[0]
    assert plain.message.tool_calls is None and plain.message.content


def test_tools_of_a_session_stay(client):
    named = dict(extra_body={"session": "told"}, max_tokens=4)
    ask(client, **named)
    again = dict(messages=[{"role": "user", "content": "And now?"}], **named)
    with pytest.raises(openai.BadRequestError, match="the tools of a session stay"):
        ask(client, **again, tools=[TIME])
    assert ask(client, **again).usage.prompt_tokens_details.cached_tokens > 0
