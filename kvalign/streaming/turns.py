"""Turns of a conversation as text, one after another for one stream.

A model with a chat template uses it; any other model uses the plain form of StreamingLLM's demo:

    USER: ...

    ASSISTANT:

"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Talk:
    """A conversation as a model reads it: what begins it, and the tokens of its turns.

    What a stream holds stays as it is: its tokens are those that the model wrote. A template may
    write earlier answers in another way than the last one (without what the model thought, or its
    empty frame). So it is given a whole conversation in which one character stands for the answer
    before, and what it writes after this character is fed.

    Messages have `role` (system: only the first; user, assistant, tool), `content` and, for an
    assistant's, perhaps `tool_calls` and `reasoning_content`; the last is a user's or a tool's.
    Where they go on (`goes_on`), an answer was fed before them.

    Attributes:
        tokenizer: of the model, with its chat template if it has one.
        system: instructions with which it begins.
        special_tokens: special tokens in contents steer the model, like the template's. Otherwise
            they are plain text, so a message cannot end itself and begin another.
        template: values for the chat template, by name (`enable_thinking`).
        tools: that the model may call, which the template tells it of.
    """

    tokenizer: PreTrainedTokenizerBase
    system: str | None = None
    special_tokens: bool = False
    template: Mapping[str, Any] | None = None
    tools: Tools = None

    def turn_ids(self, turn: str, is_first: bool) -> list[int]:
        """Tokens to feed before the model answers a user's turn."""
        return self.ids([_message("user", turn)], goes_on=not is_first)

    def ids(self, messages: list[dict[str, Any]], *, goes_on: bool) -> list[int]:
        """Tokens of the `text` of messages. A template writes the beginning of a text itself."""
        talk, masks = self, dict[str, str]()
        if not self.special_tokens:
            contents = [{x: y for x, y in message.items() if x != "role"} for message in messages]
            parts = [contents, self.system, self.tools]
            free, masks = masked([*_texts_in(parts)], self.tokenizer)
            contents, system, tools = _with_texts(parts, iter(free))
            messages = [{**a, **b} for a, b in zip(messages, contents, strict=True)]
            talk = replace(self, system=system, tools=tools)
        text = talk.text(messages, goes_on=goes_on)
        prefix = not goes_on and not self.tokenizer.chat_template
        return ids_of(text, self.tokenizer, prefix=prefix, goes_on=goes_on, masks=masks)

    def text(self, messages: list[dict[str, Any]], *, goes_on: bool) -> str:
        """Return the text to feed for messages before the model answers; UserError for a template
        that leaves one of them out.
        """
        opening = [] if self.system is None else [_message("system", self.system)]
        if not self.tokenizer.chat_template:
            return "\n\n" * goes_on + "".join(map(_plain, [*opening * (not goes_on), *messages]))
        answer = next(unused_in([*_texts_in([opening, messages, self.tools])]))
        before = [_message("user", "?"), _message("assistant", answer)] if goes_on else []
        dialect = Dialect.of(self.tokenizer)
        talk, tools = dialect.conversation([*opening, *before, *messages], self.tools)
        text = render(self.tokenizer, talk, to_answer=True, values=self.template, tools=tools)
        for message in (*opening, *messages):
            content = message["content"].strip()
            as_json = json.dumps(content, ensure_ascii=False)[1:-1]
            if message["role"] != "assistant" and content not in text and as_json not in text:
                what = f"leaves out the {message['role']}'s message"
                raise UserError(f"the chat template of this model {what}")
        if goes_on and answer not in text:
            raise UserError("the chat template of this model leaves out earlier answers")
        return text.partition(answer)[2] if goes_on else text

    def opening_len(self, *, goes_on: bool = False) -> int:
        """Tokens before the user's first word, for sinks to keep; `goes_on`: of a later turn."""
        one, other = (self.ids([_message("user", x)], goes_on=goes_on) for x in ("?", "0"))
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
        return sum(1 for _ in alike)

    def word_starts(self, turns: Sequence[int]) -> list[int]:
        """Position at which the user's words begin in turns: after the tokens that introduce them;
        for the first turn, after the opening.

        Args:
            turns: number of tokens before each; for the first of a conversation 0.
        """
        num_opening, num_asking = (self.opening_len(goes_on=x) for x in (False, True))
        return [turn + (num_asking if turn else num_opening) for turn in turns]

    def evict_turns(
        self, turns: Sequence[int], ids: Sequence[int], *, size: int, num_answer: int
    ) -> tuple[int, list[int]]:
        """Evict the oldest turns of a conversation, each as a whole, until the last one fits. The
        last one stays in any case, and so does the opening.

        Args:
            turns: number of tokens before each that has not been evicted, as of `word_starts`.
            ids: all tokens of the conversation, its last turn included.
            size: entries of the cache.
            num_answer: longest answer in tokens. Room is left for it, up to half the cache.

        Returns:
            The number of turns that are evicted now, and the tokens that stay.
        """
        begins, num_opening = self.word_starts(turns), self.opening_len()
        room = size - num_opening - min(num_answer, size // 2)
        fits = (i for i, begin in enumerate(begins) if len(ids) - begin <= room)
        num = next(fits, len(begins) - 1)
        return num, [*ids[:num_opening], *ids[begins[num] :]] if num else [*ids]


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
