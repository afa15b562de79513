"""Turns of a conversation as text, one after another for one stream.

A model with a chat template uses it; any other model uses the plain form of StreamingLLM's demo:

    USER: ...

    ASSISTANT:

"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any

from torch import Tensor
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import typed
from kvalign.models.input_ids import ids_of, masked, special_of, unused_in
from kvalign.streaming.template import Dialect, Tools, render


def turn_ids(
    tokenizer: PreTrainedTokenizerBase,
    turn: str,
    is_first: bool,
    system: str | None = None,
    *,
    special_tokens: bool = False,
) -> list[int]:
    """Tokens to feed before the model answers a user's turn, as of `message_ids`."""
    how: dict[str, Any] = {"goes_on": not is_first, "special_tokens": special_tokens}
    return message_ids(tokenizer, [_message("user", turn)], system=system, **how)


def message_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    *,
    goes_on: bool,
    system: str | None = None,
    special_tokens: bool = False,
    template: Mapping[str, Any] | None = None,
    tools: Tools = None,
) -> list[int]:
    """Tokens of `messages_text`. A template writes the beginning of a text itself.

    Args:
        template: values for the chat template, by name (`enable_thinking`).
        special_tokens: special tokens in contents steer the model, like the template's. Otherwise
            they are plain text, so a message cannot end itself and begin another.
    """
    masks: dict[str, str] = {}
    if not special_tokens:
        contents = [{x: y for x, y in message.items() if x != "role"} for message in messages]
        free, masks = masked([*_texts_in([contents, system, tools])], tokenizer)
        contents, system, tools = _with_texts([contents, system, tools], iter(free))
        messages = [{**a, **b} for a, b in zip(messages, contents, strict=True)]
    text = messages_text(
        tokenizer, messages, goes_on=goes_on, system=system, template=template, tools=tools
    )
    prefix = not goes_on and not tokenizer.chat_template
    return ids_of(text, tokenizer, prefix=prefix, goes_on=goes_on, masks=masks)


def opening_len(
    tokenizer: PreTrainedTokenizerBase,
    system: str | None,
    *,
    goes_on: bool = False,
    special_tokens: bool = False,
    template: Mapping[str, Any] | None = None,
    tools: Tools = None,
) -> int:
    """Tokens before the user's first word, which sinks should keep; `goes_on`: in a later turn."""
    how: dict[str, Any] = dict(special_tokens=special_tokens, template=template, tools=tools)
    one, other = (
        message_ids(tokenizer, [_message("user", word)], goes_on=goes_on, system=system, **how)
        for word in ("?", "0")
    )
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in alike)


def word_starts(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[int],
    system: str | None,
    *,
    special_tokens: bool = False,
) -> list[int]:
    """Position at which the user's words begin in turns: after the tokens that introduce them; for
    the first turn, after the opening.

    Args:
        turns: number of tokens before each; for the first of a conversation 0.
    """
    num_opening, num_asking = (
        opening_len(tokenizer, system, goes_on=goes_on, special_tokens=special_tokens)
        for goes_on in (False, True)
    )
    return [turn + (num_asking if turn else num_opening) for turn in turns]


def evict_turns(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[int],
    ids: Sequence[int],
    system: str | None,
    *,
    size: int,
    num_answer: int,
    special_tokens: bool = False,
) -> tuple[int, list[int]]:
    """Evict the oldest turns of a conversation, each as a whole, until the last one fits. The last
    one stays in any case, and so does the opening.

    Args:
        turns: number of tokens before each that has not been evicted, as of `word_starts`.
        ids: all tokens of the conversation, its last turn included.
        system: instructions with which it begins.
        size: entries of the cache.
        num_answer: longest answer in tokens. Room is left for it, up to half the cache.

    Returns:
        The number of turns that are evicted now, and the tokens that stay.
    """
    begins = word_starts(tokenizer, turns, system, special_tokens=special_tokens)
    num_opening = opening_len(tokenizer, system, special_tokens=special_tokens)
    room = size - num_opening - min(num_answer, size // 2)
    fits = (i for i, begin in enumerate(begins) if len(ids) - begin <= room)
    num = next(fits, len(begins) - 1)
    return num, [*ids[:num_opening], *ids[begins[num] :]] if num else [*ids]


def messages_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    *,
    goes_on: bool,
    system: str | None = None,
    template: Mapping[str, Any] | None = None,
    tools: Tools = None,
) -> str:
    """Return the text to feed for several messages, the last of them a user's or a tool's, before
    the model answers.

    What a stream holds stays as it is: its tokens are those that the model wrote. A template may
    write earlier answers in another way than the last one (without what the model thought, or its
    empty frame). So it is given a whole conversation in which one character stands for the answer
    before, and what it writes after this character is returned.

    Args:
        tokenizer: of the model, with its chat template if it has one.
        messages: of `role` (system: only the first; user, assistant, tool), `content` and, for
            an assistant's, perhaps `tool_calls` and `reasoning_content`.
        goes_on: an answer was fed before them.
        template: values for the template, by name.
        tools: that the model may call, which the template tells it of.
    """
    opening = [] if system is None else [_message("system", system)]
    if not tokenizer.chat_template:
        return "\n\n" * goes_on + "".join(map(_plain, [*opening * (not goes_on), *messages]))
    answer = next(unused_in([*_texts_in([opening, messages, tools])]))
    before = [_message("user", "?"), _message("assistant", answer)] if goes_on else []
    talk, told = Dialect.of(tokenizer).conversation([*opening, *before, *messages], tools)
    text = render(tokenizer, talk, to_answer=True, values=template, tools=told)
    for message in (*opening, *messages):
        content = message["content"].strip()
        as_json = json.dumps(content, ensure_ascii=False)[1:-1]
        if message["role"] != "assistant" and content not in text and as_json not in text:
            what = f"leaves out the {message['role']}'s message"
            raise UserError(f"the chat template of this model {what}")
    if goes_on and answer not in text:
        raise UserError("the chat template of this model leaves out earlier answers")
    return text.partition(answer)[2] if goes_on else text


def answer_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that ends an answer in a chat template, or follows it; None without one."""
    if not tokenizer.chat_template:
        return None
    special, (answer, next_turn) = special_of(tokenizer), islice(unused_in([]), 2)
    turn = [_message("user", "?"), _message("assistant", answer)]
    for more in ([], [_message("user", next_turn)]):
        try:
            text = render(tokenizer, [*turn, *more], to_answer=False)
        except UserError:  # a template that cannot be used is refused where it is needed
            continue
        after = text.partition(answer)[2].partition(next_turn)[0]
        ids = ids_of(after, tokenizer, prefix=False, goes_on=True)
        if ends := [token for token in ids if token in special]:
            return ends[0]
    return None


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end an answer, sorted: those that the model's generation_config names, its config
    or its tokenizer, and the one with which its chat template ends an answer.

    Published models name the end of a turn in one of these places and not in the others. A model
    that writes it and is not stopped goes on as the user.
    """
    ends = {*ends_of(model.generation_config), *ends_of(model.config.get_text_config())}
    return sorted((ends | {tokenizer.eos_token_id, answer_end(tokenizer)}) - {None})


def ends_of(config: GenerationConfig | PretrainedConfig) -> list[int]:
    """End tokens that a config or a generation_config names: none, one or several."""
    end = config.eos_token_id
    if isinstance(end, Tensor):
        end = end.reshape(-1).tolist()
    ends = [] if end is None else end if isinstance(end, list | tuple) else [end]
    which = "generation_config" if isinstance(config, GenerationConfig) else "config"
    return [typed(f"eos_token_id of a model's {which}", one, int) for one in ends]


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts_in([*value.items()])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts_in(one)


def _with_texts(value: Any, texts: Iterator[str]) -> Any:
    """The same value with other texts, in the order of `_texts_in`."""
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, dict):
        return dict(_with_texts([*value.items()], texts))
    if isinstance(value, list | tuple):
        return [_with_texts(one, texts) for one in value]
    return value


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _plain(message: dict[str, str]) -> str:
    """A message in the plain form: an answer stands behind the word that asks for it."""
    role, content = message["role"], message["content"]
    if role == "user":
        return f"USER: {content}\n\nASSISTANT:"
    space = " " if role == "assistant" and not content[:1].isspace() else ""
    return f"{space}{content}\n\n"
