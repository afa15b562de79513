"""Settings of transformers' `generate` that a stream refuses.

`generate` itself makes logits processors and stopping criteria of most settings, and the loop of a
stream obeys those. It cannot obey a setting by which something else calls the model, or by which
the model gets another cache or another input. A test goes through all settings of the installed
transformers, so that a new one is not passed over.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import GenerationConfig, GenerationMixin

from kvalign.foundation.errors import KeywordError, UserError
from kvalign.foundation.names import nearest

_ASSISTED = "has no assisted generation"
_BEAMS = "has no beam search"
_CONSTRAINTS = "has no constrained beam search"
_NO_GUIDANCE = "has no guidance, for which the model reads a second text in a cache that grows"
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
    "guidance_scale": (_NO_GUIDANCE, 1),
    "inputs_embeds": ("needs token ids, input_ids instead of inputs_embeds", None),
    "is_assistant": ("cannot assist another model", False),
    "max_cache_len": (_OWN_CACHE, None),
    "negative_prompt_attention_mask": (_NO_GUIDANCE, None),
    "negative_prompt_ids": (_NO_GUIDANCE, None),
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

OBEYED = (
    *(name for name in vars(GenerationConfig()) if not name.startswith("_")),
    *inspect.signature(GenerationMixin.generate).parameters,
    *("input_ids", "attention_mask", "tokenizer", "assistant_tokenizer"),
)
"""All other settings: they act as they do without a stream, or have nothing to act on."""

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
        elif value is not None and name not in own:
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
