"""Calls of tools as models write them: a table of the forms that models were trained on, and what
is read in each. What is no call of a known tool stays text.

The forms are those that the chat templates of these models write (DeepSeek's, Hermes', Meta's,
Mistral's, MeetKai's and Qwen's, on the hub), and that vLLM and llama.cpp read.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MOST_DEPTH = 100  # of values within values, in JSON; no schema of a tool comes near it
_TOO_DEEP = f"its values are nested over {MOST_DEPTH} deep"
_NAME, _ARGUMENTS = "NAME", "ARGUMENTS"


class Call(NamedTuple):
    name: str
    arguments: str  # JSON
    id: str = ""  # as the model wrote it


class CallForm(NamedTuple):
    """Form of a call.

    Attributes:
        begin, end: marks around it. Without `begin` the whole answer is one call, without `end` the
            call ends where the next begins.
        written: what stands between the marks.
        marks: others in it.
        frame: marks around several, which say nothing.
    """

    begin: str
    end: str
    written: str
    marks: tuple[str, ...] = ()
    frame: tuple[str, ...] = ()

    def text(self, name: str, arguments: str) -> str:
        """Return a call as it is written, with its marks."""
        head, tail = (self.begin + self.written + self.end).split(_ARGUMENTS)
        return head.replace(_NAME, name) + arguments + tail


def _deepseek(name: str) -> str:
    bar = "\N{FULLWIDTH VERTICAL LINE}"
    return f"<{bar}tool▁{name}{bar}>"


_SEP = _deepseek("sep")
_DEEPSEEK = CallForm(
    _deepseek("call▁begin"),
    _deepseek("call▁end"),
    f"function{_SEP}{_NAME}\n```json\n{_ARGUMENTS}\n```",
    (_SEP,),
    (_deepseek("calls▁begin"), _deepseek("calls▁end")),
)
_MISTRAL = CallForm("[TOOL_CALLS]", "", f'[{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}]')
FORMS = {
    "hermes": CallForm(  # and Qwen's
        "<tool_call>", "</tool_call>", f'\n{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}\n'
    ),
    "functionary": CallForm("<function=", "</function>", f"{_NAME}>{_ARGUMENTS}"),
    "deepseek-r1": _DEEPSEEK,
    "deepseek-v3.1": _DEEPSEEK._replace(written=f"{_NAME}{_SEP}{_ARGUMENTS}"),
    "mistral": _MISTRAL,
    "mistral-v11": _MISTRAL._replace(
        written=f"{_NAME}[ARGS]{_ARGUMENTS}", marks=("[ARGS]", "[CALL_ID]")
    ),
    "llama": CallForm(
        "", "", f'{{"name": "{_NAME}", "parameters": {_ARGUMENTS}}}', ("<|python_tag|>",)
    ),
}
_KEYS = ("arguments", "parameters")  # models write either, whatever their template says
_NAMED = re.compile(
    rf"(?:function{_SEP})?([\w.-]+)\s*(?:>|{_SEP}|(?:\[CALL_ID\](\w+))?\[ARGS\]|```(?:json)?)?\s*"
    r"(\{.*\})\s*(?:```)?",
    re.DOTALL,
)
_XML = re.compile(r"<function=([\w.-]+)>\s*(.*?)\s*</function>", re.DOTALL)  # Qwen3-Coder
_PARAMETER = re.compile(r"<parameter=([\w.-]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def form_in(text: str) -> CallForm | None:
    """The form in which a text has a call of `look_up` with {"place": "Rome"}; None: unknown."""
    squeezed = "".join(text.split())
    for form in FORMS.values():
        if "".join(form.text("look_up", '{"place":"Rome"}').split()) in squeezed:
            return form
    marked = (form for form in FORMS.values() if form.begin)
    return next((form for form in marked if form.begin in text and form.end in text), None)


def read_json(text: str) -> Any:
    """A value in JSON; ValueError for another text, NaN, and values nested over `MOST_DEPTH`."""

    def refused(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(text, parse_constant=refused)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level, depth = [value], 0
    while level := [x for one in level for x in _inner(one) if isinstance(x, dict | list)]:
        depth += 1
        if depth >= MOST_DEPTH:
            raise ValueError(_TOO_DEEP)
    return value


def _inner(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def calls_in(text: str, tools: Mapping[str, Mapping[str, Any]]) -> list[Call]:
    """The calls that a text between marks is; none if anything in it is no call of a known tool.

    Args:
        tools: JSON schemas of the parameters, by the tools' names.
    """
    text = text.strip()
    calls = _as_json(text) or _as_json(f"{text}]") or _as_named(text) or _as_xml(text, tools)
    return calls if all(call.name in tools for call in calls) else []


def _as_json(text: str) -> list[Call]:
    """Calls that are objects; none if one is not."""
    try:
        value = read_json(text)
    except ValueError:
        return []
    calls = [_of_object(one) for one in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call] if all(calls) else []


def _of_object(value: Any) -> Call | None:
    if not isinstance(value, dict):
        return None
    keys = [key for key in _KEYS if key in value]
    others = value.keys() - {"name", "type", "id", *_KEYS}
    name, written = value.get("name"), value.get("id")
    if others or len(keys) > 1 or not isinstance(name, str):
        return None
    arguments = value[keys[0]] if keys else {}
    if isinstance(arguments, str):  # JSON within JSON
        try:
            arguments = read_json(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, dict):
        return None
    return Call(name, as_text(arguments), written if isinstance(written, str) else "")


def _as_named(text: str) -> list[Call]:
    if not (match := _NAMED.fullmatch(text)):
        return []
    name, written, arguments = match.groups()
    try:
        return [Call(name, as_text(read_json(arguments)), written or "")]
    except ValueError:
        return []


def _as_xml(text: str, tools: Mapping[str, Mapping[str, Any]]) -> list[Call]:
    """A call with arguments in marks of their own: text, if the schema does not say otherwise."""
    match = _XML.fullmatch(text)
    if not match or _PARAMETER.sub("", match[2]):
        return []
    about = tools.get(match[1], {}).get("properties")
    values: dict[str, Any] = {}
    for name, value in _PARAMETER.findall(match[2]):
        kind = about.get(name) if isinstance(about, dict) else None
        values[name] = value
        if isinstance(kind, dict) and kind.get("type", "string") != "string":
            try:
                values[name] = read_json(value)
            except ValueError:
                return []
    return [Call(match[1], as_text(values))]


def as_text(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def marks_of(form: CallForm | None, thoughts: Sequence[str] | None) -> set[str]:
    """Marks that a reader of an answer looks for."""
    marks = {*(thoughts or ())}
    return marks | ({form.begin, form.end, *form.marks, *form.frame} - {""} if form else set())
