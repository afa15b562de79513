"""Messages of a conversation and its tools, in the forms of OpenAI's API: chats and responses."""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from kvalign.app.serve.errors import RequestError
from kvalign.streaming.calls import read_json

_MOST_IGNORED = 20  # names that are told
_OF_A_FORM = re.compile("constrain|ebnf|format|grammar|guided|json|lark|regex|schema|structur")
"""Words in the name of a field that promises a form of an answer, whatever API has it."""
_NO_VALUE = """
access_programs adapter_id audio cfg_scale character chat_instruct_command chat_template
chat_template_args chat_template_kwargs connectors context conversation custom_logit_processor
custom_params detail dry_allowed_length dry_base dry_penalty_last_n dry_sequence_breakers
dynatemp_exponent enable_search enable_thinking extra_body file file_data file_id format
generation_config guided_choice guided_grammar guided_json guided_regex guideline image image_url
include input input_audio input_ids inputs instruction_template instruction_template_str
instructions json_schema logprobs lora_path max_completion_tokens max_new_tokens max_output_tokens
messages mirostat_eta mirostat_tau mm_processor_kwargs models moderation n_discard n_predict name
namespace num_ctx num_predict nvext output_config output_schema parameters plugins preamble
prediction preset previous_response_id prompt prompt_embeds prompt_logprobs prompt_mode provider
random_seed reasoning_budget reasoning_effort reasoning_format repeat_last_n response_format
response_prefix samplers sampling_params search_options search_parameters session session_params
spaces_between_special_tokens stop_sequences structural_tag structured_outputs system
system_prompt template template_vars text think thinking thinking_budget thinking_token_budget
tool_prompt top_logprobs truncate truncate_prompt_tokens typical vllm_xargs web_search_options
xtc_threshold
"""
_VALUES: dict[str, tuple[Any, ...]] = {
    "add_special_tokens async background ban_eos_token continue_final_message defer_loading echo "
    "ignore_eos include_obfuscation include_stop_str_in_output no_stop_trim raw return_token_ids "
    "return_tokens_as_token_ids safe_prompt thinking_forced_open token_healing use_beam_search "
    "watermark": (False,),
    "add_generation_prompt do_sample include_reasoning parse_tool_calls separate_reasoning "
    "skip_special_tokens stream_reasoning": (True,),
    "dry_multiplier dynatemp_range frequency_penalty min_new_tokens min_tokens mirostat n_indent "
    "n_keep n_probs no_repeat_ngram_size presence_penalty top_a xtc_probability": (0,),
    "best_of length_penalty num_beams repeat_penalty tfs_z typical_p": (1,),
    "top_n_sigma": (-1,),
    "allowed_token_ids bad_words banned_strings banned_tokens context_management documents "
    "functions logits_processors lora stop_token_ids tools transforms": ([],),
    "logit_bias options": ({},),
    "grammar negative_prompt refusal suffix": ("",),
    "allowed_callers": (["direct"],),
    "caller": ({"type": "direct"},),
    "function_call": ("none",),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "reasoning": ({}, {"effort": "none"}),
    "tool_choice": ("none", "auto"),
    "truncation": ("auto",),
    "verbosity": ("medium",),
}
REFUSED: dict[str, tuple[Any, ...]] = dict.fromkeys(_NO_VALUE.split(), ()) | {
    name: values for names, values in _VALUES.items() for name in names.split()
}
"""Fields of OpenAI's API, vLLM, llama.cpp and others that would change an answer where they are not
obeyed, by name; the values ask for nothing of them, and null always does.
"""


class RequestPart(BaseModel, extra="forbid", strict=True):
    """Part of a request. Each field that an API has is obeyed, is harmless, or is refused by name,
    and so is a `type` that is not known, and a field whose name promises a form. Another name that
    no API has is ignored, and noted in the list `ignored` of pydantic's context.

    Attributes:
        harmless: fields that change no token of an answer.
        within: field of the request that has this part.
        inner: field in which a chat has all but the type, and a response has nothing.
    """

    harmless: ClassVar[Collection[str]] = ()
    within: ClassVar[str | None] = None
    inner: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _only_obeyed(cls, values: Any, info: ValidationInfo) -> Any:
        ignored = (info.context or {}).get("ignored", [])
        return cls.obeyed(values, ignored) if isinstance(values, dict) else values

    @classmethod
    def obeyed(cls, values: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
        """The fields that are obeyed; ignored ones are noted, RequestError for a refused one."""
        where, fields = f"{cls.within}: " if cls.within else "", {}
        inner = values.get(cls.inner) if cls.inner else None
        if isinstance(inner, dict):
            rest = {name: value for name, value in values.items() if name != cls.inner}
            values = inner | rest
        names = {field.alias or name for name, field in cls.model_fields.items()}
        kinds = get_args(cls.model_fields["type"].annotation) if "type" in names else ()
        kind = values.get("type")
        if isinstance(kind, str) and kinds and kind not in kinds:
            only = f"the type {kind!r:.80} is not supported, only {' and '.join(kinds)}"
            raise RequestError(f"{where}{only}", param=cls.within, code="unsupported")
        for name, value in values.items():
            if name in names:
                fields[name] = value
            elif name in cls.harmless:
                continue
            elif name in REFUSED:
                if value is not None and value not in REFUSED[name]:
                    raise unsupported(f"{where}{name}", cls.within or name)
            elif value and _OF_A_FORM.search(name.lower()):
                raise unsupported(f"{where}{name:.80}", cls.within or name)
            elif len(ignored) < _MOST_IGNORED and f"{where}{name}" not in ignored:
                ignored.append(f"{where}{name}")
        return fields


def unsupported(what: str, param: str) -> RequestError:
    """Return the error for what would change an answer, and is not obeyed here."""
    return RequestError(f"{what} is not supported: leave it out", param=param, code="unsupported")


MOST_TOOLS = 128
_MOST_PARTS = 256  # of a message


class TextPart(RequestPart):
    harmless: ClassVar = ("prompt_cache_breakpoint", "annotations", "logprobs")
    within = "content"
    type: Literal["text", "input_text", "output_text"]
    text: str


def _joined(content: Any, info: ValidationInfo) -> Any:
    """The text of a message: parts joined by a line end, as vLLM, TensorRT-LLM and llama.cpp do."""
    if not isinstance(content, list):
        return content
    if len(content) > _MOST_PARTS:
        raise ValueError(f"a message has at most {_MOST_PARTS} parts, got {len(content)}")
    try:
        parts = [TextPart.model_validate(part, context=info.context) for part in content]
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from None
    return "\n".join(part.text for part in parts)


def _an_object(arguments: str) -> str:
    value = read_json(arguments or "{}")
    if not isinstance(value, dict):
        raise ValueError("arguments of a call must be the text of a JSON object")
    return json.dumps(value)


JoinedText = Annotated[str, BeforeValidator(_joined)]
Arguments = Annotated[str, AfterValidator(_an_object)]


class OfFunction(RequestPart):
    """A tool, its name, or a call of it."""

    inner = "function"
    type: Literal["function"]
    name: str


class ToolCall(OfFunction):
    harmless: ClassVar = ("index",)
    within = "messages"
    id: str | None = None
    arguments: Arguments


class Message(RequestPart):
    """One message; `content` is its text."""

    harmless: ClassVar[Collection[str]] = ("annotations",)
    within = "messages"
    role: Literal["system", "user", "assistant", "tool"]
    content: JoinedText
    reasoning_content: str | None = None  # what was thought before an answer
    tool_call_id: str | None = None
    _call: dict[str, str] = PrivateAttr(default_factory=dict)  # of a result: whose it is
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS)] | None = None

    @classmethod
    def obeyed(cls, values: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
        if values.get("role") == "tool":  # as litellm and older clients say what was called
            values = {name: value for name, value in values.items() if name != "name"}
        if values.get("role") == "assistant" and isinstance(values.get("reasoning"), str):
            values = {"reasoning_content": values["reasoning"], **values}
            del values["reasoning"]  # as vLLM and OpenRouter call it
        fields = super().obeyed(values, ignored)
        if fields.get("role") == "developer":
            fields["role"] = "system"
        has_more = fields.get("tool_calls") or fields.get("reasoning_content")
        if has_more and fields.get("content") is None:
            fields["content"] = ""
        return fields

    @property
    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """Names and arguments of its calls."""
        return [(one.name, json.loads(one.arguments)) for one in self.tool_calls or ()]

    def for_template(self) -> dict[str, Any]:
        """The message as a chat template takes it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.role == "assistant" and self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        message |= self._call
        ids = [_short(call.id or str(number)) for number, call in enumerate(self.tool_calls or ())]
        calls = [as_call(one, *call) for one, call in zip(ids, self.calls, strict=True)]
        return {**message, "tool_calls": calls} if calls else message


def as_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call in OpenAI's form."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _short(call_id: str) -> str:
    """An id of a call as Mistral's templates want it: 9 letters and digits."""
    is_short = re.fullmatch("[A-Za-z0-9]{9}", call_id)
    return call_id if is_short else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def in_order(results: Sequence[Message], calls: Sequence[tuple[str | None, str]]) -> list[Message]:
    """Results of calls, in the order of the calls, whose ids and names these are. Without ids they
    are in that order.

    Raises:
        RequestError: a result of no call, or a call that alone has none.
    """

    def refused(what: str) -> RequestError:
        return RequestError(f"messages: {what}", param="messages", code="tool_call_id")

    by_id = {one.tool_call_id: one for one in results if one.tool_call_id}
    names = {call_id: name for call_id, name in calls if call_id}
    for call_id in by_id:
        if call_id not in names:
            raise refused(f"the tool_call_id {call_id!r:.80} is of no call of the answer before")
    if not by_id:
        if len(results) != len(calls):
            counts = f"{len(results)} results follow {len(calls)} calls"
            raise refused(f"{counts}: give each result the tool_call_id of its call")
        ordered = [*results]
    elif len(by_id) < len(results) or len(names) < len(calls):
        raise refused("each call needs an id of its own, and each result the tool_call_id of one")
    else:
        for call_id in names:
            if call_id not in by_id:
                raise refused(f"the call {call_id!r:.80} has no result")
        ordered = [by_id[call_id] for call_id in names]
    for number, (one, (own, name)) in enumerate(zip(ordered, calls, strict=True)):
        one._call = {"name": name, "tool_call_id": _short(own or str(number))}
    return ordered


def matched(messages: Sequence[Message]) -> list[Message]:
    """Messages with results in the order of their calls. First ones are of calls of the server."""
    ordered, calls = list[Message](), list[tuple[str | None, str]]()
    for is_result, run in groupby(messages, key=lambda message: message.role == "tool"):
        several = [*run]
        begins = all(message.role == "system" for message in ordered)
        ordered += in_order(several, calls) if is_result and not begins else several
        calls = [(call.id, call.name) for call in several[-1].tool_calls or ()]
    return ordered


class Item(Message):
    """An item of /v1/responses, read as the message that it is."""

    harmless = (*Message.harmless, "id", "status", "phase", "summary", "encrypted_content")
    within = "input"

    @classmethod
    def obeyed(cls, values: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
        values = dict(values)
        kind = values.pop("type", "message")
        if kind == "function_call":
            call: dict[str, Any] = {"type": "function"}
            call |= {name: values.pop(name) for name in ("name", "arguments") if name in values}
            call["id"] = values.pop("call_id", None)
            values |= {"role": "assistant", "content": "", "tool_calls": [call]}
        elif kind == "function_call_output":
            values |= {"role": "tool", "content": values.pop("output", None)}
            values["tool_call_id"] = values.pop("call_id", None)
        elif kind == "reasoning":
            parts = values.pop("content", None) or values.pop("summary", None) or []
            texts = (one["text"] for one in parts if isinstance(one, dict) and "text" in one)
            thoughts = "\n".join(text for text in texts if isinstance(text, str))
            values |= {"role": "assistant", "content": "", "reasoning_content": thoughts}
        elif kind != "message":
            raise unsupported(f"input: an item of the type {kind!r:.80}", "input")
        return super().obeyed(values, ignored)


def messages_of(items: Iterable[Message]) -> list[Message]:
    """The messages that items are: the thoughts, the text and the calls of an answer make one."""
    messages = list[Message]()
    for role, run in groupby(items, key=lambda message: message.role):
        several = list(run)
        calls = [call for message in several for call in message.tool_calls or ()]
        thoughts = "".join(message.reasoning_content or "" for message in several)
        if role == "assistant" and (calls or thoughts):
            content = "".join(message.content for message in several)
            fields: dict[str, Any] = dict(tool_calls=calls or None, reasoning_content=thoughts)
            several = [Message(role=role, content=content, **fields)]
        messages += several
    return messages


class Tool(OfFunction):
    within = "tools"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # its arguments obey its parameters

    def for_template(self) -> dict[str, Any]:
        """The tool as a chat template takes it."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        about = {"description": self.description or "", "parameters": parameters}
        return {"type": "function", "function": {"name": self.name, **about}}


class NamedTool(OfFunction):
    within = "tool_choice"
