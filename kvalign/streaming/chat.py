"""Conversation in one stream: turns in, answers out, each turn to be edited later.

talk = kvalign.chat(model, tokenizer, system="Answer in one sentence.")
for piece in talk.say("Who lived on the island?"):
    print(piece, end="", flush=True)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from kvalign.cache.default_size import LARGEST_DEFAULT
from kvalign.cache.memory_sizes import usual_recalled
from kvalign.foundation.errors import UserError
from kvalign.foundation.machine import free_bytes
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

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvalign.aligners import Aligner
    from kvalign.methods.base import Method
    from kvalign.streaming.text_stream import TextStream
    from kvalign.streaming.turns import Talk

# Notes of a stream: the system prompt; how many tokens came before each turn; what goes when the
# cache is full; how many turns have gone as a whole.
SYSTEM, TURNS, EVICT, NUM_GONE = "system", "turns", "evict", "gone"
OFFERED = 100_000  # tokens of a memory
SHARE = 1 / 2  # of the memory that is free, for what all streams keep
OVERHEAD = 1.25  # of a stored token: the sketch of its keys
# How a turn is answered where neither the caller nor the model says how to draw.
CALM = {"do_sample": True, "temperature": 0.3, "top_p": 0.9}
# In a talk, against answers that repeat earlier ones. A server's requests have code and JSON, too.
UNREPEATED = {"repetition_penalty": 1.1}
MOST_OF_ANSWER = 1000  # tokens, of a model that ends its answers
WINDOW = 256  # generated tokens that a penalty counts, the model's own or ours
# Entries that a step takes back from a memory. With more of them a fact of an early turn is less
# likely to be answered (docs/tutorials/memory.md).
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

        stream, talk, notes = self.stream, self._talk, self.stream.notes
        new = talk.turn_ids(typed("turn", turn, str), not stream.ids)
        is_told_so = self.is_cut and self.tokenizer.chat_template
        cut = ids_of(CUT, self.tokenizer, prefix=False, goes_on=True) if is_told_so else []
        stream.feed([*cut, *new])
        notes[TURNS] = f"{notes.get(TURNS, '')} {len(stream.ids) - len(new)}".strip()
        if EVICT in notes:
            num_gone, size = self._num_gone, stream.method.sizes.cache_size
            room = dict(size=size, num_answer=stream.sampling.max_new_tokens or size)
            more, rest = talk.evict_turns(self.begins[num_gone:], stream.ids, **room)
            if more:
                notes[NUM_GONE] = str(num_gone + more)
                stream.encode_anew(rest)

    @property
    def begins(self) -> list[int]:
        """The number of tokens before each turn; for a file without that record, none."""
        return [int(word) for word in self.stream.notes.get(TURNS, "").split() if word.isdecimal()]

    def edit(self, number: int, text: str) -> str:
        """Replace your words in a turn, counted from 1, and say so in a line; its answer and what
        follows are not encoded again. UserError if there is no such turn.
        """
        stream, begins = self.stream, self._begins_to_edit(number)
        start = begins[number - 1]
        answers = [first for first, _ in stream.answers] + [len(stream.ids) - len(stream.token_ids)]
        stop = next(first for first in answers if first > start)
        new = self._talk.turn_ids(text, number == 1)
        return f"turn {number} is edited: {self._replaced(begins, start, stop, new)}"

    def forget(self, number: int) -> str:
        """Cut a turn, counted from 1, with its answer; errors and the rest as of `edit`."""
        begins = self._begins_to_edit(number)
        words = [*self._talk.word_starts(begins), len(self.stream.ids)]
        start, stop = words[number - 1 : number + 1]
        if number == len(begins):  # up to the answer before
            start = begins[-1]
        if not start:
            raise UserError("it is the only turn: /reset starts the conversation again")
        # The next turn will begin where this one did.
        del begins[min(number, len(begins) - 1)]
        return f"turn {number} is forgotten: {self._replaced(begins, start, stop)}"

    def _begins_to_edit(self, number: int) -> list[int]:
        begins = self.begins
        if EVICT in self.stream.notes:
            raise UserError("with --evict turns a conversation is encoded again, not edited")
        if not 1 <= typed("number", number, int) <= len(begins):
            raise UserError(f"this conversation has {len(begins)} turns, got {number}")
        return begins

    def _replaced(self, begins: list[int], start: int, stop: int, *new: list[int]) -> str:
        """Edit the stream, record where its turns begin then, and return what was replaced."""
        num_before = len(self.stream.ids)
        num_gone = self.stream.edit(start, stop, *new)
        moved_by = len(self.stream.ids) - num_before
        turns = (x if x <= start else x + moved_by for x in begins)
        self.stream.notes[TURNS] = " ".join(map(str, turns))
        note = f", {num_gone} of which had been evicted" if num_gone else ""
        return f"{stop - start} tokens{note}; what follows was not encoded again"

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

    @property
    def _num_gone(self) -> int:
        note = self.stream.notes.get(NUM_GONE, "")
        return min(int(note), max(0, len(self.begins) - 1)) if note.isdecimal() else 0

    @property
    def num_forgotten(self) -> int:
        """Number of first turns of which only sinks are in the cache. Policies other than `oldest`
        evict entries of every turn, so only turns that were evicted as a whole count.
        """
        sizes = self.stream.method.sizes
        if not sizes.is_oldest:
            return self._num_gone
        first, last = sizes.num_sinks, sizes.num_sinks + self.stream.num_evicted
        return max(self._num_gone, sum(first < end <= last for end in self.begins[1:]))

    def forgotten_in_words(self) -> str:
        """`the first 3 turns are out of the cache`; "" if none is."""
        if not (num := self.num_forgotten):
            return ""
        what = "the first turn is" if num == 1 else f"the first {num} turns are"
        sizes = self.stream.method.sizes
        is_lost = not sizes.memory or sizes.num_forgotten(self.stream.num_evicted) or self._num_gone
        return f"{what} out of the cache" + ("" if is_lost else ", in the memory")

    def memory_offer(self) -> str:
        """Return what would keep the turns that go; "" where there is a memory, or none works."""
        method = self.stream.method
        if method.sizes.memory or EVICT in self.stream.notes or not takes_memory(method):
            return ""
        return f"--memory {OFFERED} keeps evicted tokens and takes back what is asked for"

    def in_words(self) -> str:
        """Return which turns are in the cache and which are not, a line each."""
        stream, sizes = self.stream, self.stream.method.sizes
        num_out, gone = stream.num_evicted, self.forgotten_in_words()
        lines = [
            f"conversation: {len(self.begins)} turns, {len(stream.ids)} tokens",
            f"in the cache: {stream.num_fed - num_out} tokens, at most {sizes.cache_size}; the "
            f"first {sizes.num_sinks} are never evicted",
            f"out of the cache: {num_out} tokens" + (f" ({gone})" if gone else ""),
        ]
        if sizes.memory:
            assert sizes.num_recalled is not None  # those give way in the window, too
            num = min(num_out + sizes.num_recalled, sizes.memory) if num_out else 0
            lines.append(f"in the memory: {num} tokens, at most {sizes.memory}, to be taken back")
            lines.append(f"forgotten: {sizes.num_forgotten(num_out)} tokens")
        elif offer := self.memory_offer():
            lines.append(f"in a memory: none; {offer}, which is slower")
        return "\n".join(lines)


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
    options: dict[str, Any] = drawing(config)
    opening_len = Talk(tokenizer, system, special_tokens).opening_len()
    if system is not None and options.get("num_sinks") is None:
        options["num_sinks"] = opening_len
    if options.get("memory") and options.get("num_recalled") is None:
        options["num_recalled"] = num_recalled_for(cache_size, options.get("num_sinks"))
    how = {**chat_defaults(unwrapped(model), tokenizer), **options}
    begun = stream(model, tokenizer, method=method, cache_size=cache_size, **how)
    if options.get("memory") is None and not begun.sampling.lookup:
        begun.method = remembering(begun.method)
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
    """Conversation that `Chat.save` or `kvalign chat --state` wrote; as `kvalign.load_stream`."""
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


def takes_memory(method: Method) -> bool:
    """Return whether a memory works with a method of these sizes."""
    from kvalign.memory.memories import Memories
    from kvalign.methods.cached import Cached

    if not isinstance(method, Cached):
        return False
    try:
        sizes = replace(method.sizes, memory=OFFERED, num_recalled=None)
        of_model = method.places_by, method.model.config, method.num_positions
        Memories(method.spec, sizes, *of_model)
    except UserError:
        return False
    return True


def bytes_of_a_token(method: Method) -> float:
    """Bytes that a stored token takes, at most."""
    from kvalign.cache.default_size import bytes_of_an_entry

    return OVERHEAD * bytes_of_an_entry(method.model, method.sizes.cache_dtype)


def may_remember(method: Method) -> bool:
    """Return whether a method may have a memory where nobody says it: one works, and is not
    allocated at once, as with compiled steps and on a card.
    """
    return method.stepper is None and method.model.device.type == "cpu" and takes_memory(method)


def usual_memory(method: Method, num_streams: int = 1) -> int:
    """Return how many evicted tokens a conversation keeps where nobody says it: `OFFERED`, or as
    many as `SHARE` of the free memory has room for. 0: it may have no memory; by the model's plan
    that does not surely help; it would hold less than the cache.
    """
    from kvalign.memory.plan import find_plan

    if not may_remember(method):
        return 0
    plan, num = find_plan(method.model, getattr(method, "aligner", None)), OFFERED
    if plan is None or not plan.helps:
        return 0
    if (free := free_bytes()) is not None:
        num = min(num, int(free * SHARE / num_streams / bytes_of_a_token(method)))
    return num if num >= method.sizes.cache_size else 0


def remembering(method: Method, num_streams: int = 1, most_recalled: int = MOST_RECALLED) -> Method:
    """Return a method, which has been fed nothing, with the memory that it has where nobody says
    it; itself if that is none.
    """
    from kvalign.memory.plan import as_planned

    if not (num := usual_memory(method, num_streams)):
        return method
    sizes, aligner = method.sizes, getattr(method, "aligner", None)
    sizes = replace(sizes, memory=num, num_recalled=None)
    sizes = as_planned(method.model, aligner, sizes, {})
    assert sizes.num_recalled is not None
    sizes = replace(sizes, num_recalled=min(most_recalled, sizes.num_recalled))
    options: dict[str, Any] = {"aligner": aligner} if aligner else {}
    own = type(method)(method.model, sizes, **options)
    own.why_size, own.warns = method.why_size, method.warns
    return own


def num_recalled_for(cache_size: int | None, num_sinks: int | None) -> int:
    """Return how many entries a step of a conversation takes back from its memory."""
    return min(MOST_RECALLED, usual_recalled(cache_size or LARGEST_DEFAULT, num_sinks or 0))
