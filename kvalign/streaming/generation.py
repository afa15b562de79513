"""The one generation loop: an iterator of tokens. The command line, the evaluations and
`model.generate` all use it.

    model.generate(
        **inputs, custom_generate=kvalign.stream_generate, cache_size=64, max_new_tokens=2000
    )
"""

import functools
from collections.abc import Callable, Collection, Iterator
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
from kvalign.foundation.settings import expect
from kvalign.methods import AUTO, MethodConfig, make_method
from kvalign.methods.base import Method
from kvalign.methods.choice import warn_if_too_long
from kvalign.models.input_ids import check_ids
from kvalign.models.wrapped import unwrapped
from kvalign.streaming.choosing import Chooser
from kvalign.streaming.ends import named_in
from kvalign.streaming.generate_settings import (
    MADE,
    check_call,
    check_config,
    check_processors,
    given_to_generate,
)
from kvalign.streaming.lookup import Lookup, check_lookup

_PREPARED = "_eos_token_tensor"
"""What a generation_config has that a call of `generate` has prepared for its loop."""


@torch.no_grad()
def stream_tokens(
    method: Method,
    prompt: Tensor,
    *,
    processors: LogitsProcessorList | None = None,
    criteria: StoppingCriteriaList | None = None,
    do_sample: bool = False,
    eos_token_ids: Collection[int] = (),
    pad_token_id: int | None = None,
    generator: torch.Generator | None = None,
    before: Tensor | None = None,
    mask: Tensor | None = None,
    lookup: int = 0,
) -> Iterator[Tensor]:
    """Feed a prompt and yield new tokens [B] int64, without end unless the criteria stop it or
    every row has ended.

    Args:
        method: from `make_method`.
        prompt: [B, T] int64, T >= 1; rows of unequal lengths are padded on the left.
        processors: transformers' logits processors; they see the whole history.
        criteria: transformers' stopping criteria, checked after each token.
        do_sample: draw from the processed distribution; otherwise take the most likely token.
        eos_token_ids: tokens that end a row; empty: none.
        pad_token_id: yielded for an ended row; default: the first end token.
        generator: source of random numbers; default: torch's global one.
        before: [B, P] int64, the tokens that the method has been fed, when the prompt continues its
            stream; processors and criteria see them too. The prompt then begins with the last token
            that was yielded, which has not been fed. None begins a new stream.
        mask: [B, T], 0 where a prompt is padded; None: no padding.
        lookup: most tokens of one stream that are guessed at a time and read in the same pass
            (`kvalign.streaming.lookup`). The tokens are the same, but come sooner. 0: none.

    Raises:
        UserError: an empty prompt, or one with padding other than on the left; a processor that
            calls the model; lookup for several rows, or with a method that cannot undo guesses.
        RunError: non-finite logits; the message says where they come from.
    """
    expect("method", method, Method, "one of kvalign.make_method")
    check_ids(prompt)  # what is fed of it is compared with the vocabulary
    check_processors(processors)
    ids = prompt if before is None else torch.cat([before, prompt], 1)
    chooser = Chooser(ids, processors, do_sample, generator)
    guesser = None
    if lookup:
        check_lookup(method)
        if len(ids) > 1:
            raise UserError(f"lookup is for one stream, got {len(ids)} rows")
        guesser = Lookup(lookup, ids[0].tolist())
    ends = torch.tensor(sorted(eos_token_ids), device=prompt.device)
    pad = pad_token_id if pad_token_id is not None else (ends[0] if len(ends) else 0)
    going = torch.ones(len(prompt), dtype=torch.bool, device=prompt.device)
    if before is None:
        method.reset()
    logits = method.feed(prompt) if mask is None or mask.all() else _feed_rows(method, prompt, mask)
    while True:
        token = torch.where(going, chooser.choose(logits, method), pad)
        chooser.append(token)
        yield token
        if len(ends):
            going = going & ~torch.isin(token, ends)
        if criteria:
            going = going & ~criteria(chooser.ids, None)
        if not going.any() or method.tokens_left == 0:
            return
        if guesser is None:
            logits = method.feed(token[:, None])
        else:
            guesser.append(int(token))
            logits = guesser.feed(method)


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
            (`kvalign.streaming.generate_settings` lists which of them act).

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
    given, config = given_to_generate(), generation_config
    check_call(stream_generate, given | {x: keywords[x] for x in keywords.keys() - MADE})
    check_config(config, model.generation_config)
    named = {key: keywords.pop(key) for key in MethodConfig.__annotations__ if key in keywords}
    if stop_strings is not None:
        tokenizer = given.get("tokenizer") or keywords.get("tokenizer")
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
        eos_token_ids=named_in(config),
        pad_token_id=config.pad_token_id,
        mask=keywords.get("attention_mask"),
    )
    new = []
    if stream_to is not None:
        stream_to.put(input_ids.cpu())
    else:
        stream_to = given.get("streamer")  # which has been given the prompt
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


def _feed_rows(method: Method, prompt: Tensor, mask: Tensor) -> Tensor:
    """Begin a stream with the prompts of a batch, each fed alone, without its padding."""
    mask = mask.to(prompt.device).bool()
    if mask.shape != prompt.shape or not mask[:, -1].all() or (mask[:, :-1] > mask[:, 1:]).any():
        raise UserError(
            "prompts of unequal lengths are padded on the left (padding_side='left'), got another "
            "attention mask"
        )
    rows = [method.new() for _ in prompt]
    logits = [row.feed(ids[own][None]) for row, ids, own in zip(rows, prompt, mask, strict=True)]
    method.join(rows)
    return torch.cat(logits)
