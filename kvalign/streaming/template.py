"""A chat template: a program from outside, in Jinja's sandbox; what it takes is found by trying."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from kvalign.foundation.errors import UserError, check_text
from kvalign.streaming.calls import FORMS, CallForm, as_text, form_in

Tools = Sequence[Mapping[str, Any]] | None
"""Functions that the model may call, in OpenAI's form, as `apply_chat_template` takes them."""
_THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))  # Qwen3, SmolLM3; Magistral
ArgumentsForm = Literal["mapping", "text"]
_ABOUT_TOOLS = """\
You may call these tools. To call one, write its name and its arguments as JSON, as here:
{example}
The tools:
{tools}"""


@dataclass(frozen=True)
class Dialect:
    """Parts of a conversation that a chat template takes; the rest is written into its texts.

    Attributes:
        tells_of_tools: whether it tells the model of them.
        form: in which the model writes a call; None: unknown.
        arguments: how it takes those of an earlier call; None: it leaves calls out.
        several: whether it takes several calls of an answer.
        thoughts: marks around what the model thinks before it answers; None: it does not.
        takes_thoughts: whether thoughts are a field of a message.
    """

    tells_of_tools: bool
    form: CallForm | None
    arguments: ArgumentsForm | None
    several: bool
    thoughts: tuple[str, str] | None
    takes_thoughts: bool

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "Dialect":
        """The dialect of a tokenizer's chat template. Of one that always fails it has nothing."""
        return _dialect_of(tokenizer, str(tokenizer.chat_template), len(tokenizer))

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools
    ) -> tuple[list[dict[str, Any]], Tools]:
        """Messages and tools as the template takes them.

        Args:
            messages: in OpenAI's form, but a call's arguments are a mapping; `reasoning_content`
                is what the model thought.
        """
        talk = [self._message(one) for one in messages]
        if tools and not self.tells_of_tools:
            example = (self.form or FORMS["hermes"]).text("TOOL", '{"PARAMETER": "VALUE"}')
            about = _ABOUT_TOOLS.format(
                example=example, tools="\n".join(as_text(one["function"]) for one in tools)
            )
            if talk[0]["role"] == "system":
                talk[0] = {**talk[0], "content": f"{talk[0]['content']}\n\n{about}"}
            else:
                talk.insert(0, {"role": "system", "content": about})
            tools = None
        return talk, tools

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        fields, calls = dict(message), message.get("tool_calls") or ()
        thoughts = fields.pop("reasoning_content", None)
        if fields["role"] == "tool" and self.arguments is None:
            result = f"<tool_response>\n{fields['content']}\n</tool_response>"
            return {"role": "user", "content": result}
        if calls and self.arguments is None:
            form, functions = self.form or FORMS["hermes"], (x["function"] for x in calls)
            written = [form.text(x["name"], as_text(x["arguments"])) for x in functions]
            del fields["tool_calls"]
            fields["content"] = "\n".join(filter(None, [fields["content"], *written]))
        elif calls:
            if len(calls) > 1 and not self.several:
                raise UserError("the chat template of this model takes one call of an answer")
            if self.arguments == "text":
                fields["tool_calls"] = [_with_text(one) for one in calls]
        if thoughts and self.takes_thoughts:
            fields["reasoning_content"] = thoughts
        elif thoughts and self.thoughts:
            begin, end = self.thoughts
            fields["content"] = f"{begin}\n{thoughts}\n{end}\n\n{fields['content']}"
        return fields


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": as_text(function["arguments"])}}


@lru_cache(maxsize=8)
def _dialect_of(tokenizer: PreTrainedTokenizerBase, template: str, num_tokens: int) -> Dialect:
    user, function = {"role": "user", "content": "?"}, {"name": "look_up", "description": "?"}
    tool: dict[str, Any] = {"type": "function", "function": {**function, "parameters": {}}}

    def tried(*answers: dict[str, Any], of: Tools = None) -> str:
        try:
            return render(tokenizer, [user, *answers], to_answer=False, tools=of)
        except UserError:
            return ""

    def answer(content: str, **fields: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": content, **fields}

    with_tool = tried(of=[tool])
    tells_of_tools, of = "look_up" in with_tool, [tool] if with_tool else None
    call: dict[str, Any] = {"id": "call12345", "type": "function"}
    call["function"] = {"name": "look_up", "arguments": {"place": "Rome"}}
    result = {"role": "tool", "content": "0result0", "name": "look_up", "tool_call_id": call["id"]}
    calls: dict[ArgumentsForm, Any] = {"mapping": call, "text": _with_text(call)}
    written: dict[ArgumentsForm, str] = {}
    for way, one in calls.items():
        text = tried(answer("", tool_calls=[one]), of=of)
        is_shown = text.count("look_up") > with_tool.count("look_up") and "Rome" in text
        if is_shown and "0result0" in tried(answer("", tool_calls=[one]), result, of=of):
            written[way] = text
    # JSON, if the template writes that; else marks of another kind around each argument.
    of_json = [how for how, text in written.items() if '{"place":"Rome"}' in "".join(text.split())]
    how = next(iter([*of_json, *written]), None)
    form, several = form_in(written[how] if how else with_tool), True
    if how:
        both = tried(answer("", tool_calls=[calls[how]] * 2), of=of)
        several = both.count("Rome") > written[how].count("Rome")
    added = tokenizer.get_added_vocab().keys()
    marks = (x for x in _THOUGHTS if {*x} <= added or any(mark in template for mark in x))
    return Dialect(
        tells_of_tools=tells_of_tools,
        form=form if tells_of_tools else form or FORMS["hermes"],
        arguments=how,
        several=several,
        thoughts=next(marks, None),
        takes_thoughts="0thought0" in tried(answer("!", reasoning_content="0thought0")),
    )


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict],
    to_answer: bool,
    values: Mapping[str, Any] | None = None,
    tools: Tools = None,
) -> str:
    """Return what a chat template writes; UserError if it fails."""
    values = values or {}
    reserved = inspect.signature(tokenizer.apply_chat_template).parameters.keys() | {"messages"}
    if clashes := sorted(name for name in values if name in reserved or name.endswith("_token")):
        raise UserError(f"a chat template takes no {clashes[0]} from a request")
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=to_answer, **values
        )
        assert isinstance(text, str)
        check_text(text)
    except Exception as error:  # a program from outside raises anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the chat template of this model fails: {reason:.300}") from None
    return text
