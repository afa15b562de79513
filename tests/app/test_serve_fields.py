"""Each field of OpenAI's requests is obeyed by `kvalign serve`, is harmless, or refused by name.
The names are those of the installed `openai` package: a newer one's new field fails here.
"""

import json
from itertools import product
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from openai.types import completion_create_params as text_params
from openai.types import responses as theirs
from openai.types.chat import ChatCompletionContentPartParam as Part
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageParam
from openai.types.chat import ChatCompletionStreamOptionsParam as StreamOptionsParam
from openai.types.chat import completion_create_params as chat_params
from openai.types.chat.chat_completion_content_part_refusal_param import (
    ChatCompletionContentPartRefusalParam as RefusalPart,
)
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from openai.types.responses.response_input_param import FunctionCallOutput

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.messages import REFUSED, Item, Message, TextPart, Tool
from kvalign.app.serve.responses import ResponseRequest
from kvalign.app.serve.wire import ChatRequest, Completion, StreamOptions, parsed


def names(*kinds):
    return set().union(*(get_type_hints(kind) for kind in kinds))


FIELDS = {
    ChatRequest: names(chat_params.CompletionCreateParamsStreaming),
    Completion: names(text_params.CompletionCreateParamsStreaming),
    Message: names(*get_args(ChatCompletionMessageParam)) | set(ChatCompletionMessage.model_fields),
    TextPart: names(*get_args(Part), RefusalPart),
    StreamOptions: names(StreamOptionsParam),
}
NOT_OBEYED = [
    (form, name)
    for form, known in FIELDS.items()
    for name in sorted(known - {*form.model_fields, *form.harmless})
]


def asked(form, **fields):
    """A request with these fields in a part of it, as it is read."""
    hello, part = {"role": "user", "content": "Hello"}, {"type": "text", "text": "Hello"}
    whole = {
        Completion: lambda: {"prompt": "Hello", **fields},
        ChatRequest: lambda: {"messages": [hello], **fields},
        Message: lambda: {"messages": [{**hello, **fields}]},
        TextPart: lambda: {"messages": [{**hello, "content": [{**part, **fields}]}]},
        StreamOptions: lambda: {"messages": [hello], "stream_options": fields},
    }[form]()
    kind = Completion if form is Completion else ChatRequest
    return parsed(kind, json.dumps({"model": "m", **whole}).encode(), {})


@pytest.mark.parametrize(("form", "name"), NOT_OBEYED)
def test_what_would_change_an_answer_is_refused_by_name(form, name):
    assert name in REFUSED, "no rule: does it change an answer?"
    with pytest.raises(RequestError, match=f"{name} is not supported") as caught:
        asked(form, **{name: "something"})
    assert caught.value.param == (form.within or name)
    for neutral in (None, *REFUSED[name]):
        assert asked(form, **{name: neutral}) == asked(form)


@pytest.mark.parametrize("form", FIELDS)
def test_what_is_harmless_changes_nothing(form):
    assert asked(form, **dict.fromkeys(form.harmless, "something")) == asked(form)


@pytest.mark.parametrize("form", FIELDS)
def test_only_a_name_that_no_api_has_is_ignored_and_told(form):
    where = f"{form.within}: " if form.within else ""
    one = asked(form, nobody_has_this=5)
    assert one.ignored == [f"{where}nobody_has_this"]
    assert one.model_dump() == asked(form).model_dump()
    with pytest.raises(RequestError, match="mirostat is not supported"):
        asked(form, mirostat=2)
    assert asked(form, mirostat=0) == asked(form)


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        (ResponseRequest, ResponseCreateParamsStreaming),
        (Tool, theirs.FunctionToolParam),
        (Item, theirs.ResponseFunctionToolCallParam),
        (Item, theirs.EasyInputMessageParam),
        (Item, FunctionCallOutput),
    ],
)
def test_each_field_of_responses_has_a_rule(form, kind):
    read_as = {"type", "name", "arguments", "output", "call_id"} if form is Item else set()
    assert names(kind) - {*form.model_fields, *form.harmless, *REFUSED, *read_as} == set()


@pytest.mark.parametrize("form", [ChatRequest, Completion, Message, StreamOptions])
@pytest.mark.parametrize(
    "name",
    [
        # vLLM, llama.cpp, SGLang, Ollama, TGI, TabbyAPI, LM Deploy, NIM, Gemini's API, and any.
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        *("grammar", "json_schema", "regex", "ebnf", "structural_tag", "format", "parameters"),
        *("grammar_string", "regex_pattern", "responseSchema", "response_schema", "json_mode"),
        *("nvext", "extra_body", "sampling_params", "options", "constrained_by", "stop_regex"),
    ],
)
def test_no_promise_of_a_form_is_only_ignored(form, name):
    with pytest.raises(RequestError, match=f"{name} is not supported"):
        asked(form, **{name: {"type": "object"}})
    assert asked(form, **{name: None}).model_dump() == asked(form).model_dump()


@pytest.mark.parametrize("kind", ["regex", "grammar", "ebnf", "json", "json_object_schema"])
def test_a_form_of_another_type_is_refused_by_name(kind):
    with pytest.raises(RequestError, match=f"the type '{kind}' is not supported"):
        asked(ChatRequest, response_format={"type": kind, "value": "[0-9]"})


def test_what_shapes_the_beginning_is_what_it_is_looked_up_by():
    plain, tool = asked(ChatRequest), {"type": "function", "function": {"name": "f"}}
    fields = [{}, {"a": True}, {"a": False}], [[], [tool]]
    openings = [
        asked(ChatRequest, chat_template_kwargs=values, tools=tools).opening
        for values, tools in product(*fields)
    ]
    assert plain.opening == openings[0] == "" and len({*openings}) == len(openings)
    for name in ("enable_thinking", "reasoning_effort", "documents", "think", "system", "template"):
        with pytest.raises(RequestError, match=f"{name} is not supported"):
            asked(ChatRequest, **{name: "low"})


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", -2), ("repetition_penalty", 0), ("chat_template_kwargs", {"a": "<|im_end|>"})],
)
def test_sampling_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=name):
        asked(ChatRequest, **{name: value})


def test_no_logprobs_are_not_those_of_the_token_that_was_drawn():
    """0 asks for the latter, of a completion; False for none, of a chat."""
    assert asked(ChatRequest, logprobs=False).num_top is asked(ChatRequest).num_top is None
    assert asked(Completion, logprobs=0).num_top == asked(ChatRequest, logprobs=True).num_top == 0
    with pytest.raises(RequestError, match="top_logprobs needs logprobs"):
        asked(ChatRequest, top_logprobs=2)


def test_two_names_of_a_field_agree():
    assert asked(ChatRequest, max_tokens=3, max_completion_tokens=3).most_tokens == 3
    with pytest.raises(RequestError, match="max_tokens and max_completion_tokens differ"):
        asked(ChatRequest, max_tokens=3, max_completion_tokens=4)


def test_parts_of_a_message_are_lines():
    parts = [{"type": "text", "text": text} for text in ("Who", "lived there?")]
    (message,) = asked(Message, content=parts).messages
    assert message.content == "Who\nlived there?"


def test_the_page_names_the_harmless_fields():
    page = Path(__file__).parents[2] / "docs" / "requests.md"
    said = page.read_text(encoding="utf-8")
    harmless = {*ChatRequest.harmless, *Completion.harmless}
    assert {name for name in harmless if f"`{name}`" not in said} == set()
