"""Fields of a part of a request: obeyed, harmless, refused by name, or ignored."""

from collections.abc import Collection
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ValidationInfo, model_validator

from kvalign.app.serve.errors import RequestError

_MOST_IGNORED = 20  # names that are told
_NO_VALUE = """
access_programs audio chat_template chat_template_kwargs conversation detail dry_allowed_length
dry_base dry_penalty_last_n dry_sequence_breakers dynatemp_exponent enable_thinking file file_data
file_id format guided_choice guided_grammar guided_json guided_regex image image_url include input
input_audio instructions json_schema logprobs max_completion_tokens max_new_tokens max_output_tokens
messages mirostat_eta mirostat_tau mm_processor_kwargs models moderation n_discard n_predict name
namespace num_ctx num_predict output_schema prediction previous_response_id prompt prompt_logprobs
provider reasoning_effort reasoning_format repeat_last_n response_format samplers
spaces_between_special_tokens structural_tag structured_outputs system text think thinking
thinking_budget top_logprobs truncate truncate_prompt_tokens typical web_search_options
xtc_threshold
"""
_VALUES: dict[str, tuple[Any, ...]] = {
    "add_special_tokens async background continue_final_message defer_loading echo ignore_eos "
    "include_obfuscation include_stop_str_in_output return_token_ids "
    "return_tokens_as_token_ids safe_prompt use_beam_search watermark": (False,),
    "add_generation_prompt do_sample include_reasoning skip_special_tokens": (True,),
    "dry_multiplier dynatemp_range frequency_penalty min_tokens mirostat n_keep n_probs "
    "no_repeat_ngram_size presence_penalty top_a xtc_probability": (0,),
    "best_of length_penalty num_beams repeat_penalty tfs_z typical_p": (1,),
    "top_n_sigma": (-1,),
    "allowed_token_ids bad_words context_management documents functions logits_processors lora "
    "stop_token_ids tools transforms": ([],),
    "logit_bias options": ({},),
    "grammar refusal suffix": ("",),
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


class Form(BaseModel, extra="forbid", strict=True):
    """Part of a request. Each field that an API has is obeyed, is harmless, or is refused by name,
    and so is a `type` that is not known. A name that no API has is ignored, and noted in the list
    `ignored` of pydantic's context.

    Attributes:
        harmless: fields that change no token of an answer.
        within: field of the request that has this part.
    """

    harmless: ClassVar[Collection[str]] = ()
    within: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _only_obeyed(cls, values: Any, info: ValidationInfo) -> Any:
        ignored = (info.context or {}).get("ignored", [])
        return cls.obeyed(values, ignored) if isinstance(values, dict) else values

    @classmethod
    def obeyed(cls, values: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
        """Return the fields that are obeyed, and note those that are ignored; RequestError for one
        that is refused.
        """
        where, fields = f"{cls.within}: " if cls.within else "", {}
        own = {field.alias or name for name, field in cls.model_fields.items()}
        kinds = get_args(cls.model_fields["type"].annotation) if "type" in own else ()
        kind = values.get("type")
        if isinstance(kind, str) and kinds and kind not in kinds:
            only = f"the type {kind!r:.80} is not supported, only {' and '.join(kinds)}"
            raise RequestError(f"{where}{only}", param=cls.within, code="unsupported")
        for name, value in values.items():
            if name in own:
                fields[name] = value
            elif name in cls.harmless:
                continue
            elif name in REFUSED:
                if value is not None and value not in REFUSED[name]:
                    raise unsupported(f"{where}{name}", cls.within or name)
            elif len(ignored) < _MOST_IGNORED and f"{where}{name}" not in ignored:
                ignored.append(f"{where}{name}")
        return fields


def unsupported(what: str, param: str) -> RequestError:
    """Return the error for what would change an answer, and is not obeyed here."""
    return RequestError(f"{what} is not supported: leave it out", param=param, code="unsupported")
