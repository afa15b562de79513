"""Calls of tools in each form that models were trained on, and what is no call."""

import pytest
from helpers.tool_templates import SEP

from kvalign.streaming.calls import MOST_DEPTH, Call, calls_in, read_json

TOOLS = {
    "time": {},
    "weather": {"properties": {"city": {"type": "string"}, "day": {"type": "integer"}}},
}
ROME = Call("weather", '{"city": "Rome", "day": 3}')
CALLS = {
    "hermes": '\n{"name": "weather", "arguments": @}\n',
    "the other key": '{"name": "weather", "parameters": @}',
    "another order": '{"arguments": @, "name": "weather"}',
    "with a type": '{"type": "function", "name": "weather", "parameters": @}',
    "JSON in JSON": '{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\", \\"day\\": 3}"}',
    "a list": '[{"name": "weather", "arguments": @}]',
    "a list that was cut": ' [{"name": "weather", "arguments": @}',
    "mistral v11": "weather[ARGS]@",
    "functionary": "weather>@",
    "deepseek r1": f"function{SEP}weather\n```json\n@\n```",
    "deepseek v3.1": f"weather{SEP}@",
    "qwen3-coder": "\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=day>\n3\n</parameter>\n</function>\n",
}


@pytest.mark.parametrize("text", CALLS.values(), ids=CALLS)
def test_a_call_is_read_in_each_form(text):
    text = text.replace("@", ROME.arguments)
    assert calls_in(text, TOOLS) == [ROME]
    assert calls_in(text, {"time": {}}) == [], "of no known tool"


def test_the_rest_of_a_call():
    assert calls_in('{"name": "time"}', TOOLS) == [Call("time", "{}")]
    numbered = '[{"name": "time", "arguments": {}, "id": "abc123xyz"}, {"name": "time", "id": ""}]'
    assert [call.id for call in calls_in(numbered, TOOLS)] == ["abc123xyz", ""]
    assert calls_in("time[CALL_ID]abc123xyz[ARGS]{}", TOOLS)[0].id == "abc123xyz"


@pytest.mark.parametrize(
    "text",
    [
        "time()",
        "{}",
        '{"name": "time", "arguments": [1]}',
        '{"name": "time", "arguments": "now"}',
        '{"name": "time", "arguments": {"x": NaN}}',
        '{"name": "weather", "city": "Rome"}',  # arguments elsewhere: never called without them
        '{"name": "weather", "arguments": {}, "parameters": {"city": "Rome"}}',
        '[{"name": "time"}, {"name": "unknown"}]',
        '{"name": "time"} and more',
        "<function=weather><parameter=day>soon</parameter></function>",
        '{"name": "time", "arguments": ' + '{"a":' * 900 + "1" + "}" * 901,
        '{"name": "time", "arguments": ' + '{"a":' * 90000 + "1" + "}" * 90001,
    ],
    ids=lambda text: text[:50],
)
def test_what_is_no_call_stays_text(text):
    assert calls_in(text, TOOLS) == []


def test_json_has_a_depth():
    assert read_json("[" * MOST_DEPTH + "]" * MOST_DEPTH)
    with pytest.raises(ValueError, match="nested over"):
        read_json("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1))
