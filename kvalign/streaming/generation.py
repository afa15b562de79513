"""The one generation loop: an iterator of tokens. The command line, the evaluations and
`model.generate` all use it.

    model.generate(
        **inputs, custom_generate=kvalign.stream_generate, cache_size=64, max_new_tokens=2000
    )
"""

import inspect
from collections.abc import Collection, Iterator
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
from transformers.generation import GenerationMode
from transformers.generation.streamers import BaseStreamer

from kvalign.foundation.errors import UserError
from kvalign.foundation.names import check_keywords, nearest, spelled_out
from kvalign.foundation.settings import expect
from kvalign.methods import AUTO, MethodConfig, make_method
from kvalign.methods.base import Method
from kvalign.methods.choice import warn_if_too_long
from kvalign.models.input_ids import check_ids
from kvalign.streaming.choosing import Chooser
from kvalign.streaming.ends import named_in
from kvalign.streaming.lookup import Lookup, check_lookup


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
        UserError: an empty prompt, or one with padding other than on the left; lookup for several
            rows, or with a method that cannot undo guesses.
        RunError: non-finite logits; the message says where they come from.
    """
    expect("method", method, Method, "one of kvalign.make_method")
    check_ids(prompt)  # what is fed of it is compared with the vocabulary
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
    """Generate past the context length; made for `model.generate(...,
    custom_generate=stream_generate)`.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config: as `generate`
            passes them.
        method, cache_size, compile: as in `kvalign.make_method`.
        stream_to: a transformers streamer; the same as `streamer=` of `generate`.
        stop_strings: texts that end a row; they need tokenizer=..., too.
        keywords: those of `MethodConfig`, the tokenizer, and the model's inputs from `generate`.

    Returns:
        [B, prompt + new tokens] int64.

    Raises:
        UserError: anything that streaming does not support: beams, assistants, padding on the
            right, embeddings instead of ids, another cache or a filled one, dictionaries of scores.
    """
    named = {key: keywords.pop(key) for key in MethodConfig.__annotations__ if key in keywords}
    tokenizer = keywords.pop("tokenizer", None)
    for name in keywords.keys() - inspect.signature(model.forward).parameters.keys():
        if nearest(name, inspect.signature(stream_generate).parameters, cutoff=0.75):
            check_keywords(stream_generate, [name])
    config = generation_config or model.generation_config
    if stop_strings is not None:
        tokenizer = tokenizer or _given_to_generate("tokenizer")
        if tokenizer is None:
            raise UserError("stop_strings need the model's tokenizer: give tokenizer=..., too")
        ends = StopStringCriteria(tokenizer, stop_strings)
        stopping_criteria = StoppingCriteriaList([*(stopping_criteria or ()), ends])
    _refuse(config, model, keywords)
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
        stream_to = _given_to_generate("streamer")  # which has been given the prompt
    for token in tokens:
        new.append(token)
        if stream_to is not None:
            stream_to.put(token.cpu())
    if stream_to is not None:
        stream_to.end()
    return torch.cat([input_ids, torch.stack(new, 1)], 1)


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


def _given_to_generate(name: str) -> Any:
    """Return what `model.generate`, if it is the caller, was given but hands on to no function;
    else None.

    It is in the variables of that call alone, or in those of what decorates it.
    """
    generate, frame = inspect.unwrap(GenerationMixin.generate).__code__, inspect.currentframe()
    while frame is not None and frame.f_code is not generate:
        frame = frame.f_back
    if frame is None:
        return None
    around = frame.f_back.f_locals.get("kwargs") if frame.f_back is not None else None
    given = around.get(name) if isinstance(around, dict) else None
    return frame.f_locals.get(name, given)


def _refuse(config: GenerationConfig, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> None:
    if (config.num_beams or 1) > 1:
        got = config.num_beams
        raise UserError(f"streaming has no beam search: num_beams must be 1, got {got}")
    mode = config.get_generation_mode(_given_to_generate("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        what = mode.value.replace("_", " ")
        asks = "assistant_model, prompt_lookup_num_tokens, penalty_alpha, dola_layers"
        raise UserError(f"streaming has no {what}: leave out {asks}")
    own = model.generation_config.cache_implementation
    if config.cache_implementation not in (None, own):
        got = config.cache_implementation
        raise UserError(f"streaming has its own cache: leave out cache_implementation={got!r}")
    if model_kwargs.get("inputs_embeds") is not None:
        raise UserError("streaming needs token ids: input_ids instead of inputs_embeds")
    if config.return_dict_in_generate:
        raise UserError("streaming returns only ids: return_dict_in_generate must be False")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise UserError("stream_generate begins a new stream: leave past_key_values out")
