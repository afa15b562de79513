"""Conversation in one stream: turns in, answers out, each turn to be edited later.

talk = kvalign.chat(model, tokenizer, system="Answer in one sentence.")
for piece in talk.say("Who lived on the island?"):
    print(piece, end="", flush=True)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from kvalign.cache.memory_sizes import usual_recalled
from kvalign.cache.sizes import LARGEST_DEFAULT
from kvalign.foundation.names import check_keywords, spelled_out
from kvalign.foundation.settings import typed
from kvalign.methods.registry import AUTO
from kvalign.streaming.sampling import (
    DRAWS,
    MAX_NEW_TOKENS,
    Sampling,
    SamplingConfig,
    StreamConfig,
    drawing,
)
from kvalign.streaming.turns_in_cache import (
    EVICT,
    NUM_GONE,
    TURNS,
    edit_turn,
    forget_turn,
    make_room,
    note_turn,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvalign.aligners import Aligner
    from kvalign.streaming.text_stream import TextStream
    from kvalign.streaming.turns import Talk

SYSTEM = "system"  # the note of a stream that holds the system prompt
# How a turn is answered where neither the caller nor the model says how to draw.
CALM = {"do_sample": True, "temperature": 0.3, "top_p": 0.9}
# In a talk, against answers that repeat earlier ones. A server's requests have code and JSON, too.
UNREPEATED = {"repetition_penalty": 1.1}
MOST_OF_ANSWER = 1000  # tokens, of a model that ends its answers
WINDOW = 256  # generated tokens that a penalty counts, the model's own or ours
# Entries that a step takes back from a memory. With more of them a fact of an early turn is less
# likely to be answered: tests/scripts/talk.py.
MOST_RECALLED = 8
LEAST_RUNS = 20  # of an answer that may be a loop
CUT = "…"  # what the model reads after an answer that was cut, before the template ends it


class Chat:
    """Conversation that a stream holds, begun by `kvalign.chat` or `kvalign.load_chat`.

    Attributes:
        stream: its `TextStream`: `text` and `timing()` of the last answer, `sampling`, `method`.
    """

    def __init__(self, stream: TextStream, *, special_tokens: bool = False):
        self.stream, self.special_tokens = stream, special_tokens
        self.tokenizer = stream.tokenizer
        self._talk.turn_ids("?", not stream.ids)  # a template that fails is known before a turn

    @property
    def _talk(self) -> Talk:
        from kvalign.streaming.turns import Talk

        return Talk(self.tokenizer, self.system, self.special_tokens)

    @property
    def system(self) -> str | None:
        """The system prompt."""
        return self.stream.notes.get(SYSTEM)

    def say(self, turn: str) -> Iterator[str]:
        """The pieces of the answer to a turn, which ends where the model ends it. You may leave it
        before: the answer is then cut, which the model reads at the next turn.
        """
        self.feed(turn)
        return iter(self.stream)

    def go_on(self) -> Iterator[str]:
        """The pieces with which an answer goes on that was cut; UserError if none was."""
        if self.stream.is_cut or not self.is_cut:
            self.stream.go_on()
        return iter(self.stream)

    def feed(self, turn: str) -> None:
        """Read a turn. After an answer that was cut the model reads `CUT`, so it did not end."""
        from kvalign.models.input_ids import ids_of

        stream, talk = self.stream, self._talk
        new = talk.turn_ids(typed("turn", turn, str), not stream.ids)
        is_told_so = self.is_cut and self.tokenizer.chat_template
        cut = ids_of(CUT, self.tokenizer, prefix=False, goes_on=True) if is_told_so else []
        stream.feed([*cut, *new])
        note_turn(stream, len(stream.ids) - len(new))
        if EVICT in stream.notes:
            make_room(stream, talk)

    def edit(self, number: int, text: str) -> str:
        """Replace your words in a turn, counted from 1, and say so in a line; its answer and what
        follows are not encoded again. UserError if there is no such turn.
        """
        return edit_turn(self.stream, typed("number", number, int), text, self._talk)

    def forget(self, number: int) -> str:
        """Cut a turn, counted from 1, with its answer; else as `edit`."""
        return forget_turn(self.stream, typed("number", number, int), self._talk)

    def undo_edit(self) -> None:
        """Take the last `edit` or `forget` back; UserError once the conversation has gone on."""
        self.stream.undo_edit()

    def save(self, path: str | Path) -> None:
        """Write the conversation to a file, for `kvalign.load_chat` and `kvalign chat --state`."""
        self.stream.save(path)

    def reset(self) -> None:
        """Start again, with the same system prompt."""
        self.stream.reset()
        for note in (TURNS, NUM_GONE):
            self.stream.notes.pop(note, None)

    @property
    def is_cut(self) -> bool:
        """Return whether the last answer was cut, by its limit or because you left it."""
        return bool(self.stream.token_ids) and not self.stream.has_ended

    @property
    def is_loop(self) -> bool:
        """Return whether half of the last answer's runs of 4 tokens were there before in it."""
        ids = self.stream.token_ids
        runs = [*zip(ids, ids[1:], ids[2:], ids[3:], strict=False)]
        return len(runs) >= LEAST_RUNS and 2 * len({*runs}) <= len(runs)


@spelled_out(StreamConfig)
def chat(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    system: str | None = None,
    special_tokens: bool = False,
    method: str = AUTO,
    cache_size: int | None = None,
    **config: Unpack[StreamConfig],
) -> Chat:
    """Conversation without end, as of `kvalign chat`, with the same defaults: the model's chat
    template, answers that end, the model's own sampling or a calm one.

    Args:
        model, tokenizer: as in `kvalign.stream`.
        system: instructions before the first turn, never evicted.
        special_tokens: special tokens in messages act as such; by default they are plain text.
        method, cache_size, config: as in `kvalign.stream`.

    Raises:
        UserError: as in `kvalign.stream`; a chat template that fails, or takes no system prompt.
        KeywordError: an unknown setting, with the nearest known one.
    """
    from kvalign.models.wrapped import unwrapped
    from kvalign.streaming.text_stream import stream
    from kvalign.streaming.turns import Talk

    check_keywords(chat, config)
    given: dict[str, Any] = drawing(config)
    opening_len = Talk(tokenizer, system, special_tokens).opening_len()
    if system is not None and given.get("num_sinks") is None:
        given["num_sinks"] = opening_len
    if given.get("memory") and given.get("num_recalled") is None:
        given["num_recalled"] = num_recalled_for(cache_size, given.get("num_sinks"))
    how = {**chat_defaults(unwrapped(model), tokenizer), **given}
    begun = stream(model, tokenizer, method=method, cache_size=cache_size, **how)
    if system is not None:
        begun.notes[SYSTEM] = system
    return Chat(begun, special_tokens=special_tokens)


@spelled_out(SamplingConfig)
def load_chat(
    path: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    special_tokens: bool = False,
    aligner: Aligner | str | Path | None = None,
    compile: bool | None = None,
    **config: Unpack[SamplingConfig],
) -> Chat:
    """Conversation that `Chat.save` or `kvalign chat --state` wrote; the rest as of
    `kvalign.load_stream`.
    """
    from kvalign.streaming.text_stream import load_stream

    check_keywords(load_chat, config)
    how: dict[str, Any] = drawing(config)
    loaded = load_stream(path, model, tokenizer, aligner=aligner, compile=compile, **how)
    return Chat(loaded, special_tokens=special_tokens)


def talk_defaults(model: PreTrainedModel, calm: Mapping[str, Any] = CALM) -> dict[str, Any]:
    """Return the sampling of an answer, by field, where no flag and no request says it; `calm` is
    for a model that does not say how to draw.
    """
    says = Sampling.of_model(model.generation_config)
    return {"stop_at_end": True, **({} if says.keys() & set(DRAWS) else calm), **says}


def chat_defaults(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the sampling of a conversation, by field, where nobody says it."""
    most = MOST_OF_ANSWER if tokenizer.chat_template else MAX_NEW_TOKENS
    limits = {"repetition_window": WINDOW, "max_new_tokens": most}
    return {**limits, **talk_defaults(model, {**CALM, **UNREPEATED})}


def num_recalled_for(cache_size: int | None, num_sinks: int | None) -> int:
    """Return how many entries a step of a conversation takes back from its memory."""
    return min(MOST_RECALLED, usual_recalled(cache_size or LARGEST_DEFAULT, num_sinks or 0))
