"""Every setting of transformers' `generate`: a stream obeys it, has no use for it, or refuses it.

`generate` itself makes logits processors and stopping criteria of most settings, and the loop of a
stream obeys those. It cannot obey a setting by which something else calls the model, or by which
the model gets another cache or another input. A test compares the lists with the installed
transformers, so that a new setting is not passed over.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import GenerationConfig, GenerationMixin

from kvalign.foundation.errors import KeywordError, UserError
from kvalign.foundation.names import nearest
from kvalign.streaming.loop import NO_GUIDANCE

_ASSISTED = "has no assisted generation"
_BEAMS = "has no beam search"
_CONSTRAINTS = "has no constrained beam search"
_ONLY_IDS = "gives the model its ids and no other input"
_OWN_CACHE = "has its own cache"

REFUSED: dict[str, tuple[str, Any]] = {
    "assistant_early_exit": (_ASSISTED, None),
    "assistant_model": (_ASSISTED, None),
    "cache_config": (_OWN_CACHE, None),
    "cache_implementation": (_OWN_CACHE, None),
    "compile_config": ("compiles its own steps (compile=True)", None),
    "constraints": (_CONSTRAINTS, None),
    "dola_layers": ("has no DoLa generation", None),
    "force_words_ids": (_CONSTRAINTS, None),
    "guidance_scale": (NO_GUIDANCE, 1),
    "inputs_embeds": ("needs token ids, input_ids instead of inputs_embeds", None),
    "is_assistant": ("cannot assist another model", False),
    "max_cache_len": (_OWN_CACHE, None),
    "negative_prompt_attention_mask": (NO_GUIDANCE, None),
    "negative_prompt_ids": (NO_GUIDANCE, None),
    "num_beam_groups": (_BEAMS, 1),
    "num_beams": (_BEAMS, 1),
    "past_key_values": (f"begins anew and {_OWN_CACHE}", None),
    "penalty_alpha": ("has no contrastive search", 0),
    "position_ids": ("counts its positions itself", None),
    "prefill_chunk_size": ("cuts its prompt itself", None),
    "prompt_lookup_num_tokens": (f"{_ASSISTED} here (kvalign.stream has lookup=)", None),
    "return_dict_in_generate": ("returns only ids", False),
    "synced_gpus": ("does not wait for other processes", False),
    "token_healing": ("does not change the end of its prompt", False),
    "token_type_ids": (_ONLY_IDS, None),
    "use_cache": (f"{_OWN_CACHE} (method='recompute' reads the window again at each step)", True),
    "use_mtp": (_ASSISTED, False),
}
"""Settings that a stream refuses: why, and the value that asks for nothing, as None does."""

GIVE_WAY = (
    "cache_config",
    "cache_implementation",
    "max_cache_len",
    "prefill_chunk_size",
    "use_cache",
)
"""Those of the refused settings that do not matter if only the model's own generation_config has
them: they choose a cache, and change no text.
"""

_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p")
OBEYED = {
    *("input_ids", "inputs", "attention_mask", "num_return_sequences", "tokenizer"),
    *("bos_token_id", "pad_token_id", "eos_token_id"),
    *("max_length", "max_new_tokens", "max_time", "min_length", "min_new_tokens", "stop_strings"),
    *(*_SAMPLING, "epsilon_cutoff", "eta_cutoff", "renormalize_logits", "remove_invalid_values"),
    *("repetition_penalty", "encoder_repetition_penalty", "exponential_decay_length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "sequence_bias"),
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "prefix_allowed_tokens_fn"),
    *("forced_bos_token_id", "forced_eos_token_id", "watermarking_config"),
    *("generation_config", "logits_processor", "stopping_criteria"),
    *("custom_generate", "trust_remote_code", "streamer"),
}
"""Settings that act as they do without a stream."""

NO_USE = {
    *("early_stopping", "length_penalty", "diversity_penalty", "low_memory"),
    *("assistant_tokenizer", "assistant_confidence_threshold", "assistant_ensemble_weight"),
    *("assistant_lookbehind", "target_lookbehind", "speculation_type", "max_matching_ngram_size"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores"),
    *("continuous_batching_config", "disable_compile", "decoder_start_token_id"),
    "transformers_version",
}
"""Settings without effect: details of what is refused, and what a decoder does not have."""

OWN_INPUTS = ("attention_mask", "logits_to_keep", "past_key_values", "position_ids", "use_cache")
"""Inputs of the model that `generate` makes, whether or not its call has them."""


def check_call(function: Callable, arguments: Mapping[str, Any]) -> None:
    """Raise UserError for the first given argument that neither the function nor `generate` has, or
    that a stream does not obey.
    """
    own = {*inspect.signature(function).parameters, *OBEYED}
    for name, value in arguments.items():
        if name in REFUSED:
            _check(name, value)
        elif value is not None and name not in own | NO_USE:
            if near := nearest(name, own, cutoff=0.75):
                raise KeywordError(
                    f"{function.__name__}() has no keyword {name!r}: did you mean {near}?"
                )
            raise UserError(f"streaming {_ONLY_IDS}: leave out {name}")


def check_config(config: GenerationConfig, of_model: GenerationConfig) -> None:
    """Raise UserError for the first setting that a stream refuses; `of_model` is the model's own
    generation_config.
    """
    for name in REFUSED:
        value = getattr(config, name, None)
        if name not in GIVE_WAY or value != getattr(of_model, name, None):
            _check(name, value)


def arguments_of_generate() -> dict[str, Any]:
    """The arguments of the call of `model.generate` that is running, by name; none if none is. It
    hands on some of them to no function: they are in the variables of that call alone, or in those
    of what decorates it.
    """
    generate, frame = inspect.unwrap(GenerationMixin.generate), inspect.currentframe()
    while frame is not None and frame.f_code is not generate.__code__:
        frame = frame.f_back
    if frame is None:
        return {}
    names = inspect.signature(generate).parameters.keys() - {"self", "kwargs"}
    around = frame.f_back.f_locals.get("kwargs") if frame.f_back is not None else None
    of_call = {name: frame.f_locals[name] for name in names} | frame.f_locals["kwargs"]
    return (around if isinstance(around, dict) else {}) | of_call


def _check(name: str, value: Any) -> None:
    why, nothing = REFUSED[name]
    is_plain = isinstance(value, bool | int | float | str)
    if value is None or (is_plain and value == nothing):
        return
    value_text = f"={value!r:.60}" if is_plain else ""
    raise UserError(
        f"streaming {why}: leave out {name}{value_text}"
        if nothing is None
        else f"streaming {why}: {name} must be {nothing}, got {value!r:.60}"
    )
