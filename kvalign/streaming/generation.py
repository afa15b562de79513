"""`model.generate` of transformers, past the context length.

model.generate(
    **inputs, custom_generate=kvalign.stream_generate, cache_size=64, max_new_tokens=2000
)

`generate` itself makes logits processors and stopping criteria of most settings, and the loop of a
stream obeys those. It cannot obey a setting by which something else calls the model, or by which
the model gets another cache or another input. A test goes through all settings of the installed
transformers, so that a new one is not passed over.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from kvalign.foundation.errors import KeywordError, UserError
from kvalign.foundation.names import nearest, spelled_out
from kvalign.methods import MethodConfig, make_method
from kvalign.methods.base import check_ids
from kvalign.methods.choice import warn_if_too_long
from kvalign.methods.registry import AUTO
from kvalign.models.wrapped import unwrapped
from kvalign.streaming.loop import stream_tokens
from kvalign.streaming.turns import ends_of

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
    *("cache_config", "cache_implementation", "max_cache_len", "prefill_chunk_size"),
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
    """Raise UserError for an argument that is not there, or that a stream does not obey."""
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
    """Raise UserError for a refused setting that is not the model's own choice of a cache."""
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


_PREPARED = "_eos_token_tensor"
"""What a generation_config has that a call of `generate` has prepared for its loop."""


@spelled_out(MethodConfig)
def stream_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    method: str = AUTO,
    cache_size: int | None = None,
    compile: bool | None = False,
    stream_to: BaseStreamer | None = None,
    stop_strings: str | list[str] | None = None,
    **keywords: Any,
) -> Tensor:
    """Generate past the context length: `model.generate(..., custom_generate=stream_generate)`. A
    direct call is the same, with the same defaults: give `max_new_tokens`.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config: as of `generate`.
        method, cache_size, compile: as in `kvalign.make_method`. Each call makes a method anew, so
            that a stored step (compile=None) is read by request only.
        stream_to: a transformers streamer; the same as `streamer=` of `generate`.
        stop_strings: texts that end a row; they need tokenizer=..., too.
        keywords: those of `MethodConfig`, and those of `generate`
            (`kvalign.streaming.generation` lists which of them are refused).

    Returns:
        [B, prompt + new tokens] int64.

    Raises:
        UserError: anything that streaming does not support: beams, assistants, guidance, another
            cache, padding on the right, dictionaries of scores, inputs of the model besides ids.
    """
    if generation_config is None or not hasattr(generation_config, _PREPARED):
        check_ids(input_ids)
        check_call(stream_generate, keywords)
        of_generate = input_ids, generation_config, logits_processor, stopping_criteria
        own = dict(method=method, cache_size=cache_size, compile=compile, stream_to=stream_to)
        own |= dict(custom_generate=_on(model), stop_strings=stop_strings)
        return unwrapped(model).generate(*of_generate, **own, **keywords)
    arguments, config = arguments_of_generate(), generation_config
    check_call(stream_generate, arguments | {x: keywords[x] for x in keywords.keys() - OWN_INPUTS})
    check_config(config, model.generation_config)
    named = {key: keywords.pop(key) for key in MethodConfig.__annotations__ if key in keywords}
    if stop_strings is not None:
        tokenizer = arguments.get("tokenizer") or keywords.get("tokenizer")
        if tokenizer is None:
            raise UserError("stop_strings need the model's tokenizer: give tokenizer=..., too")
        ends = StopStringCriteria(tokenizer, stop_strings)
        stopping_criteria = StoppingCriteriaList([*(stopping_criteria or ()), ends])
    streaming = make_method(method, model, cache_size=cache_size, compile=compile, **named)
    warn_if_too_long(streaming, input_ids.shape[1])
    for criterion in stopping_criteria or ():
        if hasattr(criterion, "max_position_embeddings"):
            # It would warn that the context length is exceeded.
            criterion.max_position_embeddings = None
    tokens = stream_tokens(
        streaming,
        input_ids,
        processors=logits_processor,
        criteria=stopping_criteria,
        do_sample=bool(config.do_sample),
        eos_token_ids=ends_of(config),
        pad_token_id=config.pad_token_id,
        mask=keywords.get("attention_mask"),
    )
    new = []
    if stream_to is not None:
        stream_to.put(input_ids.cpu())
    else:
        stream_to = arguments.get("streamer")  # which has been given the prompt
    for token in tokens:
        new.append(token)
        if stream_to is not None:
            stream_to.put(token.cpu())
    if stream_to is not None:
        stream_to.end()
    return torch.cat([input_ids, torch.stack(new, 1)], 1)


def _on(model: PreTrainedModel) -> Callable[..., Tensor]:
    """Return `stream_generate` on a wrapped model, where `generate` gives it the inner one."""

    @functools.wraps(stream_generate)
    def generate(inner: PreTrainedModel, *args: Any, **keywords: Any) -> Tensor:
        return stream_generate(model, *args, **keywords)

    return generate
