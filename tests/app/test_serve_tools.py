"""Tools of `kvalign serve`: what the template is told, which calls are read, which are required.

Models that are this small call no tool by themselves. So what they write is given here, or required
and then obeys the tool's schema.
"""

import contextlib
import copy
import json

import openai
import pytest
import torch
from helpers.served import serving
from helpers.tool_templates import (
    BEGIN,
    BEGINS,
    END,
    ENDS,
    SEP,
    TEMPLATES,
    THINKING,
    TIME,
    WEATHER,
    template,
)
from transformers import AddedToken

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.forms import Constraints, ToolSet
from kvalign.app.serve.messages import Message
from kvalign.app.serve.reading import PieceReader, Reading
from kvalign.app.serve.sessions import digest
from kvalign.app.serve.wire import ChatRequest
from kvalign.foundation.errors import UserError
from kvalign.streaming.answer import Answer
from kvalign.streaming.calls import FORMS, Call, marks_of
from kvalign.streaming.sampling import Sampling
from kvalign.streaming.template import Dialect, render
from kvalign.streaming.turns import Talk

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ASKED = [{"role": "user", "content": "How warm is it in Rome?"}]
CALL = {"name": "weather", "arguments": '{"city": "Rome", "unit": "C"}'}


def chat(**fields):
    return ChatRequest.model_validate(
        {"model": "m", "messages": ASKED, "tools": [WEATHER, TIME], **fields}
    )


HERMES, THINK = FORMS["hermes"], ("<think>", "</think>")
KNOWN = {"weather": {}, "time": {}}


def reading(form=HERMES, **more):
    return Reading(form=form, tools=KNOWN, **more)


def read(how, *pieces):
    """Thoughts, content and calls of an answer in pieces."""
    reader = PieceReader(how)
    said = [*map(reader.read, pieces), reader.read("", is_last=True)]
    thoughts, texts, calls = zip(*said, strict=True)
    return "".join(thoughts), "".join(texts), [call for some in calls for call in some]


TWO = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time"}\n</tool_call>\n'
)
CALLS = [Call("weather", '{"city": "Rome"}'), Call("time", "{}")]
WHOLE = '{"name": "weather", "parameters": {"city": "Rome"}}'
LISTED = f'[TOOL_CALLS][{WHOLE}, {{"name": "time"}}]'
DRAFT = f"Shall I? {TWO} No.\n"
ANSWERS = {
    "two calls": (reading(), TWO, ("", "Let me see.", CALLS)),
    "the end is missing": (
        reading(),
        TWO.rstrip().removesuffix("</tool_call>"),
        ("", "Let me see.", CALLS),
    ),
    "a whole answer": (reading(FORMS["llama"]), f" {WHOLE}", ("", "", CALLS[:1])),
    "behind a mark": (reading(FORMS["llama"]), f"<|python_tag|>{WHOLE}", ("", "", CALLS[:1])),
    "a list": (reading(FORMS["mistral"]), f"So: {LISTED}", ("", "So:", CALLS)),
    "one mark each": (
        reading(FORMS["mistral-v11"]),
        '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]time[ARGS]{}',
        ("", "", CALLS),
    ),
    "in a frame": (
        reading(FORMS["deepseek-v3.1"]),
        f'So:\n{BEGINS}{BEGIN}weather{SEP}{{"city": "Rome"}}{END}{BEGIN}time{SEP}{{}}{END}{ENDS}',
        ("", "So:", CALLS),
    ),
    "functionary": (
        reading(FORMS["functionary"]),
        '<function=weather>{"city": "Rome"}</function><function=time>{}</function>',
        ("", "", CALLS),
    ),
    "a draft": (reading(thoughts=THINK), f"<think>\n{DRAFT}</think>\n\n9", (DRAFT, "9", [])),
    "a draft and a call": (
        reading(thoughts=THINK),
        f"\n<think>{DRAFT}</think>\n{TWO}",
        (DRAFT, "Let me see.", CALLS),
    ),
    "a thought that the prompt began": (
        reading(thoughts=THINK, is_thinking=True),
        f"{DRAFT}</think>9 <think>",
        (DRAFT, "9 <think>", []),
    ),
    "a thought that was cut": (reading(thoughts=THINK), f"<think>{DRAFT}", (DRAFT, "", [])),
    "a whole answer after a thought": (
        reading(FORMS["llama"], thoughts=THINK),
        f"<think>{WHOLE}</think>\n{WHOLE}",
        (WHOLE, "", CALLS[:1]),
    ),
    "no thoughts": (reading(), "<think>So</think> 9", ("", "<think>So</think> 9", [])),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_read_from_any_pieces(name):
    how, text, (thoughts, content, calls) = ANSWERS[name]
    for num in (1, 3, 7, len(text)):
        pieces = [text[i : i + num] for i in range(0, len(text), num)]
        assert read(how, *pieces) == (thoughts.strip(), content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "No call < here, nor <tool here.",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "<tool_call>time()</tool_call> and more",
        "Cut in a <tool_call>\n{",
        " a space at the end ",
        "It is {warm}.",
        '{"name": "x", "parameters": {}}',
        "{",
        "[TOOL_CALLS] none",
        "<|python_tag|>print(1)",
        "<function=unknown>{}</function>",
    ],
)
@pytest.mark.parametrize("form", [*FORMS.values(), None], ids=[*FORMS, "none"])
def test_what_is_no_call_stays_text(text, form):
    for pieces in ([text], list(text)):
        assert read(reading(form, thoughts=THINK), *pieces) == ("", text, [])


@pytest.fixture(params=TEMPLATES)
def form(request, loaded):
    """A form of calls, of which the model's template is for a while."""
    loaded.tokenizer.chat_template = TEMPLATES[request.param]
    yield request.param
    loaded.tokenizer.chat_template = None


def test_the_form_is_what_the_template_writes(form, loaded):
    """And an earlier call is written as it is read."""
    dialect = Dialect.of(loaded.tokenizer)
    assert dialect.form == FORMS[form] and dialect.several is (form != "llama")
    calls = [{"id": "a", "type": "function", "function": CALL}]
    said = Message.model_validate({"role": "assistant", "content": None, "tool_calls": calls})
    talk, _ = dialect.conversation([*ASKED, said.for_template()], None)
    text = render(loaded.tokenizer, talk, to_answer=False).partition("assistant:")[2]
    (call,) = reading(dialect.form).whole(text).calls
    assert call.name == "weather" and json.loads(call.arguments) == json.loads(CALL["arguments"])


def test_calls_of_an_unknown_form_stay_text(loaded):
    loaded.tokenizer.chat_template = TEMPLATES["hermes"].replace("tool_call>", "call>")
    with pytest.raises(RequestError, match="tool_choice: none can be required"):
        ToolSet.of(chat(tool_choice="required"), loaded.tokenizer)
    assert ToolSet.of(chat(), loaded.tokenizer).form is None
    loaded.tokenizer.chat_template = None


def test_a_model_without_a_template_refuses_tools(loaded):
    with pytest.raises(RequestError, match="^tools is not supported: this model has") as caught:
        ToolSet.of(chat(), loaded.tokenizer)
    assert caught.value.param == "tools"


def said(*calls, **more):
    """An answer of calls, given by their ids."""
    function = {"name": "time", "arguments": "{}"}
    made = [{"id": one, "type": "function", "function": function} for one in calls]
    return {"role": "assistant", "content": "", "tool_calls": made, **more}


def result(content, call=None):
    return {"role": "tool", "content": content, **({"tool_call_id": call} if call else {})}


def test_results_are_of_the_calls_that_they_name():
    talk = [*ASKED, said("a", "b"), result("2", "b"), result("1", "a")]
    more = [said("a"), result("3", "a"), said(None, ""), result("4"), result("5")]
    messages = chat(messages=[*talk, *more]).messages
    told = [one.for_template() for one in messages if one.role == "tool"]
    assert [one["content"] for one in told] == ["1", "2", "3", "4", "5"]
    assert {one["name"] for one in told} == {"time"}
    calls = [call for one in messages for call in one.for_template().get("tool_calls", ())]
    assert [x["id"] for x in calls] == [x["tool_call_id"] for x in told]


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([said("a"), result("1", "b")], "'b' is of no call"),
        ([said("a", "b"), result("1", "a")], "'b' has no result"),
        ([said("a", "b"), result("1", "a"), result("2")], "a tool_call_id of its own|each call"),
        ([said("a", "a"), result("1", "a"), result("2", "a")], "each call needs an id of its own"),
        ([said("a", "b"), result("1")], "1 results follow 2 calls"),
        ([said("a"), *ASKED, result("1", "a")], "'a' is of no call"),
    ],
)
def test_a_result_of_no_call_is_refused_by_name(messages, what):
    with pytest.raises(RequestError, match=what):
        chat(messages=[*ASKED, *messages])


def test_a_conversation_in_parts_is_the_whole(form, loaded):
    """Only new messages are written; calls and results stand in the template's own form."""
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": CALL}],
    }
    talk = [*ASKED, call, {"role": "tool", "content": 'It is "warm"'}]
    messages = [one.for_template() for one in chat(messages=talk).messages]
    tools = chat().tools
    how = dict(tools=[tool.for_template() for tool in tools])
    whole = Talk(loaded.tokenizer, **how).text(messages, goes_on=False)
    assert '{"city": "Rome", "unit": "C"}' in whole and '"weather"' in whole
    rest = Talk(loaded.tokenizer, **how).text(messages[2:], goes_on=True)
    assert whole.endswith(rest) and "warm" in rest and "Rome" not in rest
    opening = Talk(loaded.tokenizer, **how).opening_len()
    ids = Talk(loaded.tokenizer, **how).ids(messages, goes_on=False)
    assert '"description"' in loaded.tokenizer.decode(ids[:opening])
    assert opening > 5 * Talk(loaded.tokenizer).opening_len()


def test_special_tokens_in_tools_and_calls_are_text(form, loaded):
    end = loaded.tokenizer.eos_token
    tool = {"type": "function", "function": {"name": "f", "description": end, "parameters": {}}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": end}}}
    talk = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [{**call, "id": "123456789"}]},
        *ASKED,
    ]
    for special, num in ((False, 0), (True, 2)):
        written = Talk(loaded.tokenizer, tools=[tool], special_tokens=special)
        ids = written.ids(talk, goes_on=False)
        assert ids.count(loaded.tokenizer.eos_token_id) == num


def test_a_template_of_one_call_takes_no_two(loaded):
    loaded.tokenizer.chat_template = TEMPLATES["llama"]
    talk = [*ASKED, said("a", "b"), *ASKED]
    messages = [one.for_template() for one in chat(messages=talk).messages]
    with pytest.raises(UserError, match="takes one call of an answer"):
        Talk(loaded.tokenizer).ids(messages, goes_on=False)
    loaded.tokenizer.chat_template = None


@pytest.mark.parametrize("left_out", ["tools", "calls"])
def test_what_a_template_leaves_out_stands_in_its_texts(left_out, loaded):
    """As SmolLM2's, which has no tools, and SmolLM3's, which tells of them and writes no calls."""
    loaded.tokenizer.chat_template = PLAIN if left_out == "tools" else template("")
    told = 'tools <tool_call>{"name": "look_up"}</tool_call>'
    if left_out == "calls":
        loaded.tokenizer.chat_template = template("").replace("system: tools", f"system: {told}")
    tools = [tool.for_template() for tool in chat().tools]
    talk = [{"role": "system", "content": "Be brief."}, *ASKED, said("a"), result("19", "a")]
    messages = [one.for_template() for one in chat(messages=talk).messages]
    text = Talk(loaded.tokenizer, tools=tools).text(messages, goes_on=False)
    assert HERMES.text("time", "{}") in text and "<tool_response>\n19\n</tool_response>" in text
    assert text.count("Of a city.") == 1 and text.index("Of a city.") < text.index("How warm")
    assert ToolSet.of(chat(tool_choice="required"), loaded.tokenizer).form == HERMES
    loaded.tokenizer.chat_template = None


@pytest.mark.parametrize("kind", THINKING)
def test_thoughts_reach_a_template_in_its_way(kind, loaded):
    """As a field, or in the text, from which a template takes them: never as plain text."""
    loaded.tokenizer.chat_template = THINKING[kind]
    how = Reading(thoughts=Dialect.of(loaded.tokenizer).thoughts)
    assert how.thoughts == THINK
    for fields in (
        dict(content="<think>\nSo\n</think>\n\n9"),
        dict(content="9", reasoning_content="So"),
        dict(content="9", reasoning="So"),
    ):
        messages = chat(messages=[*ASKED, {"role": "assistant", **fields}, *ASKED]).messages
        messages = [how.taken_apart(one) for one in messages]
        assert (messages[1].content, messages[1].reasoning_content) == ("9", "So")
        told = [one.for_template() for one in messages]
        ids = Talk(loaded.tokenizer).ids(told, goes_on=False)
        text = "".join(loaded.tokenizer.decode(ids).split())
        assert "So" not in text and "assistant:9" in text
        assert how.is_begun(loaded.tokenizer, torch.tensor(ids)) is (kind == "text")
    loaded.tokenizer.chat_template = None


def test_an_answer_and_what_a_client_sends_back_are_the_same(loaded):
    """Ids, thoughts, blanks and the order of arguments make no difference."""
    how = reading(thoughts=THINK)
    ours = how.message("<think>So.</think>" + TWO.replace('"Rome"', '"Rome", "unit": "C"'))
    functions = [
        {"name": "weather", "arguments": '{"unit":"C","city":"Rome"}'},
        {"name": "time", "arguments": ""},
    ]
    calls = [
        {"id": x, "type": "function", "function": y} for x, y in zip("ab", functions, strict=True)
    ]
    back = {"role": "assistant", "content": "Let me see.", "tool_calls": calls}
    theirs = Message.model_validate(back)
    assert digest("", [ours]) == digest("", [theirs])
    plain = Message(role="assistant", content="Let me see.")
    assert digest("", [ours]) != digest("", [plain])


def drawn(tokenizer, constraint, num=300):
    """Tokens of a form, drawn at random up to the end."""
    generator, ids = torch.Generator().manual_seed(3), [1]
    while ids[-1] != tokenizer.eos_token_id and len(ids) < num:
        scores = torch.rand((1, len(tokenizer)), generator=generator)
        ids.append(int(constraint(torch.tensor([ids]), scores).argmax()))
    return ids[1:]


@pytest.mark.parametrize("is_special", [True, False])
def test_marks_that_are_tokens_are_written_and_read(form, is_special, loaded):
    """As Qwen's, Hermes' (not special), Mistral's and DeepSeek's are."""
    tokenizer, of = copy.deepcopy(loaded.tokenizer), FORMS[form]
    marks = marks_of(of, THINK)
    tokenizer.add_tokens([AddedToken(x, special=is_special) for x in sorted(marks)])
    named = {"type": "function", "function": {"name": "weather"}}
    tools = ToolSet.of(chat(tool_choice=named), tokenizer)
    constraints = Constraints(tokenizer, [tokenizer.eos_token_id])
    how = Reading(Dialect.of(tokenizer).thoughts, of, tools.parameters, is_thinking=True)
    ids = drawn(tokenizer, constraints.of(tools, "tool_choice", "</think>\n\n")(1))
    assert {tokenizer.get_vocab()[x] for x in ("</think>", of.begin, of.end) if x} <= {*ids}
    answer = Answer(tokenizer, [1], Sampling(), [tokenizer.eos_token_id], how.spelled(tokenizer))
    said = how.whole("".join(answer.take(token)[1] for token in ids))
    assert (said.thoughts, said.text) == ("", "") and how.num_thoughts(tokenizer, ids) == 0
    (call,) = said.calls
    assert call.name == "weather" and {*json.loads(call.arguments)} == {"city", "unit"}


def test_strict_arguments_obey_their_schema_where_the_model_may_choose(loaded, monkeypatch):
    monkeypatch.setattr(loaded.tokenizer, "chat_template", TEMPLATES["hermes"])
    function = {**WEATHER["function"], "strict": True}
    request = chat(tools=[{"type": "function", "function": function}, TIME])
    with pytest.raises(RequestError, match="tools: strict is not supported"):
        ToolSet.of(request, loaded.tokenizer)
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.add_tokens([AddedToken(HERMES.begin), AddedToken(HERMES.end)])
    begin, end = tokenizer.convert_tokens_to_ids([HERMES.begin, HERMES.end])
    tools = ToolSet.of(request, tokenizer)
    constraint = Constraints(tokenizer, [tokenizer.eos_token_id]).of(tools, "tools")(1)
    said, scores = tokenizer.encode("Let me see."), torch.rand((1, len(tokenizer)))
    allowed = constraint(torch.tensor([[1, *said]]), scores).isfinite()
    assert allowed.all(), "it may say anything, or call"
    called = tokenizer.encode('\n{"name": "weather", "arguments": {"city": "')
    ids = [1, *said, begin, *called]
    assert constraint(torch.tensor([ids]), scores).isfinite().sum() < 20
    ids += tokenizer.encode('Rome", "unit": "C"}}\n')
    assert constraint(torch.tensor([ids]), scores).isfinite().nonzero()[:, 1].tolist() == [end]
    assert constraint(torch.tensor([[*ids, end]]), scores).isfinite().all()


@pytest.fixture(params=["hermes", "llama"])
def client(request, loaded, monkeypatch):
    monkeypatch.setattr(loaded.tokenizer, "chat_template", TEMPLATES[request.param])
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


def test_a_result_alone_goes_to_the_call_of_the_session(client):
    """A call keeps its id, also when the same answer is asked for again."""
    named = {"type": "function", "function": {"name": "weather"}}
    asked = dict(tool_choice=named, extra_body={"session": "results"})
    (call,) = (first := ask(client, **asked).choices[0].message).tool_calls
    assert ask(client, **asked).choices[0].message == first
    more = dict(max_tokens=4, extra_body=asked["extra_body"])
    with pytest.raises(openai.BadRequestError, match="'no' is of no call"):
        ask(client, messages=[result("19", "no")], **more)
    assert ask(client, messages=[result("19", call.id)], **more).choices


def test_thoughts_are_a_field_of_their_own(loaded, monkeypatch):
    """In chats, streams, sessions and responses; the prompt begins them here."""
    monkeypatch.setattr(loaded.tokenizer, "chat_template", THINKING["text"])
    served = serving(loaded, cache_size=250)
    with served as one, one.client() as client:
        how = dict(tools=[], max_tokens=6, extra_body={"session": "thoughts"})
        message = (reply := ask(client, **how)).choices[0].message
        again = ask(client, **how)
        assert {x.usage.completion_tokens_details.reasoning_tokens for x in (reply, again)} == {6}
        assert message.reasoning_content and message.content == ""
        assert again.choices[0].message == message
        chunks = [x.choices[0].delta for x in ask(client, **how, stream=True)]
        told = "".join(getattr(x, "reasoning_content", None) or "" for x in chunks)
        assert told == message.reasoning_content and not any(x.content for x in chunks)
        talk = [*ASKED, message.model_dump(exclude_none=True), *ASKED]
        after = ask(client, messages=talk, **how)
        assert after.usage.prompt_tokens_details.cached_tokens > 0
        called = ask(client, tool_choice="required", tools=[WEATHER]).choices[0].message
        assert called.tool_calls and not hasattr(called, "reasoning_content")
        asked = dict(model="gpt2-mini", input=ASKED, max_output_tokens=6)
        response = client.responses.create(**asked)
        (item,) = response.output
        assert response.usage.output_tokens_details.reasoning_tokens == 6
        assert item.type == "reasoning" and item.content[0].text and response.output_text == ""
        events = [*client.responses.create(**asked, stream=True)]
        told = "".join(x.delta for x in events if x.type == "response.reasoning_text.delta")
        assert told and events[-1].response.output[0].content[0].text == told
        with pytest.raises(openai.BadRequestError, match="logprobs of a model that thinks"):
            client.responses.create(**asked, top_logprobs=1)


def nested(depth):
    """A schema of objects within objects."""
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE = {
    "400 deep": nested(200),
    "900 deep": nested(450),
    "40 deep": nested(40),
    "itself": {"$ref": "#"},
    "itself among others": {"anyOf": [{"$ref": "#"}]},
    "a part that is itself": {
        "type": "object",
        "properties": {"a": {"$ref": "#/properties/a"}},
        "required": ["a"],
    },
    "nowhere": {"$ref": "#/$defs/x"},
    "not a schema": {"type": 5},
    "a false part": {"type": "object", "properties": {"a": False}, "required": ["a"]},
}


def test_a_schema_is_obeyed_or_refused_in_a_line(client):
    for schema in HOSTILE.values():
        function = {"name": "f", "parameters": schema}
        asked = dict(tools=[{"type": "function", "function": function}], max_tokens=8)
        of_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        required, form = {**asked, "tool_choice": "required"}, dict(response_format=of_schema)
        for more in (required, asked, dict(tools=[], max_tokens=8, **form)):
            with contextlib.suppress(openai.BadRequestError):
                assert ask(client, **more).choices[0].finish_reason


def test_arguments_are_taken_or_refused_in_a_line(client):
    for depth in (90, 400, 900, 100_000):
        call = {"name": "time", "arguments": '{"a":' * depth + "1" + "}" * depth}
        calls = [{"id": "a", "type": "function", "function": call}]
        talk = [*ASKED, {"role": "assistant", "content": "", "tool_calls": calls}, result("1", "a")]
        refused = pytest.raises(openai.BadRequestError, match="nested over 100 deep")
        with contextlib.nullcontext() if depth < 100 else refused:
            assert ask(client, messages=talk, max_tokens=2).choices


def test_tools_of_a_session_stay(client):
    named = dict(extra_body={"session": "told"}, max_tokens=4)
    ask(client, **named)
    again = dict(messages=[{"role": "user", "content": "And now?"}], **named)
    with pytest.raises(openai.BadRequestError, match="the tools and .* of a session stay"):
        ask(client, **again, tools=[TIME])
    assert ask(client, **again).usage.prompt_tokens_details.cached_tokens > 0
