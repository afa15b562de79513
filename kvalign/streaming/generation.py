"""`model.generate` of transformers, past the context length.

model.generate(
    **inputs, custom_generate=kvalign.stream_generate, cache_size=64, max_new_tokens=2000
)
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from kvalign.foundation.errors import UserError
from kvalign.foundation.names import spelled_out
from kvalign.methods import MethodConfig, make_method
from kvalign.methods.choice import warn_if_too_long
from kvalign.methods.registry import AUTO
from kvalign.models.input_ids import check_ids
from kvalign.models.wrapped import unwrapped
from kvalign.streaming.generate_settings import (
    OWN_INPUTS,
    arguments_of_generate,
    check_call,
    check_config,
)
from kvalign.streaming.loop import stream_tokens
from kvalign.streaming.turns import ends_of

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
        method, cache_size, compile: as in `kvalign.make_method`.
        stream_to: a transformers streamer; the same as `streamer=` of `generate`.
        stop_strings: texts that end a row; they need tokenizer=..., too.
        keywords: those of `MethodConfig`, and those of `generate`
            (`kvalign.streaming.generate_settings` lists which of them are refused).

    Returns:
        [B, prompt + new tokens] int64.

    Raises:
        UserError: anything that streaming does not support: beams, assistants, guidance, another
            cache, padding on the right, dictionaries of scores, inputs of the model besides ids.
    """
    if generation_config is None or not hasattr(generation_config, _PREPARED):
        check_ids(input_ids)
        check_call(stream_generate, keywords)
        return unwrapped(model).generate(
            input_ids,
            generation_config,
            logits_processor,
            stopping_criteria,
            custom_generate=_on(model),
            method=method,
            cache_size=cache_size,
            compile=compile,
            stream_to=stream_to,
            stop_strings=stop_strings,
            **keywords,
        )
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
    """Return `stream_generate` on a model that may be wrapped, where `generate` gives it the inner
    one.
    """

    @functools.wraps(stream_generate)
    def generate(inner: PreTrainedModel, *args: Any, **keywords: Any) -> Tensor:
        return stream_generate(model, *args, **keywords)

    return generate
