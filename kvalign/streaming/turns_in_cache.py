"""Turns of a conversation that are still in its cache, and a line about the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvalign.foundation.errors import UserError

if TYPE_CHECKING:
    from kvalign.methods.base import Method
    from kvalign.streaming.text_stream import TextStream
    from kvalign.streaming.turns import Talk

# Notes of a stream: how many tokens came before each turn; what goes when the cache is full; how
# many turns have gone as a whole.
TURNS, EVICT, NUM_GONE = "turns", "evict", "gone"
OFFERED = 100_000  # tokens of a memory


def num_evicted(stream: TextStream) -> int:
    """Tokens that were evicted; 0 for a method of the user's own without that figure."""
    try:
        return stream.num_evicted
    except NotImplementedError:
        return 0


def note_turn(stream: TextStream, num_before: int) -> None:
    """Record that a turn begins after so many tokens."""
    stream.notes[TURNS] = f"{stream.notes.get(TURNS, '')} {num_before}".strip()


def begins_of(stream: TextStream) -> list[int]:
    """The number of tokens before each turn; for a file without that record, none."""
    return [int(word) for word in stream.notes.get(TURNS, "").split() if word.isdecimal()]


def make_room(stream: TextStream, talk: Talk) -> None:
    """Evict the oldest turns, each as a whole, until the last one fits; encode the rest again."""
    num_gone, size = _num_gone(stream), stream.method.sizes.cache_size
    more, rest = talk.evict_turns(
        begins_of(stream)[num_gone:],
        stream.ids,
        size=size,
        num_answer=stream.sampling.max_new_tokens or size,
    )
    if more:
        stream.notes[NUM_GONE] = str(num_gone + more)
        stream.encode_anew(rest)


def forget_turn(stream: TextStream, number: int, talk: Talk) -> str:
    """Cut a turn, from 1 on, with its answer, and say so; UserError if there is no such turn."""
    begins = _begins_to_edit(stream, number)
    words = [*talk.word_starts(begins), len(stream.ids)]
    start, stop = words[number - 1 : number + 1]
    if number == len(begins):  # up to the answer before
        start = begins[-1]
    if not start:
        raise UserError("it is the only turn: /reset starts the conversation again")
    # The next turn will begin where this one did.
    del begins[min(number, len(begins) - 1)]
    return f"turn {number} is forgotten: {_replaced(stream, begins, start, stop)}"


def edit_turn(stream: TextStream, number: int, text: str, talk: Talk) -> str:
    """Replace the user's words in a turn, from 1 on, and say so; UserError if there is none."""
    begins = _begins_to_edit(stream, number)
    start = begins[number - 1]
    answers = [first for first, _ in stream.answers] + [len(stream.ids) - len(stream.token_ids)]
    stop = next(first for first in answers if first > start)
    new = talk.turn_ids(text, number == 1)
    return f"turn {number} is edited: {_replaced(stream, begins, start, stop, new)}"


def _begins_to_edit(stream: TextStream, number: int) -> list[int]:
    begins = begins_of(stream)
    if EVICT in stream.notes:
        raise UserError("with --evict turns the conversation is encoded again: it is not edited")
    if not 1 <= number <= len(begins):
        raise UserError(f"this conversation has {len(begins)} turns, got {number}")
    return begins


def _replaced(stream: TextStream, begins: list[int], start: int, stop: int, *new: list[int]) -> str:
    """Edit a stream, record where its turns begin then, and return in words what was replaced."""
    num_before = len(stream.ids)
    num_gone = stream.edit(start, stop, *new)
    moved_by = len(stream.ids) - num_before
    stream.notes[TURNS] = " ".join(str(x if x <= start else x + moved_by) for x in begins)
    note = f", {num_gone} of which had been evicted" if num_gone else ""
    return f"{stop - start} tokens{note}; what follows was not encoded again"


def _num_gone(stream: TextStream) -> int:
    note, num_turns = stream.notes.get(NUM_GONE, ""), len(begins_of(stream))
    return min(int(note), max(0, num_turns - 1)) if note.isdecimal() else 0


def num_forgotten(stream: TextStream) -> int:
    """Number of first turns of which only sinks are in the cache. Policies other than `oldest`
    evict entries of every turn, so only turns that were evicted as a whole count.
    """
    sizes, num_gone = stream.method.sizes, _num_gone(stream)
    if not sizes.is_oldest:
        return num_gone
    first, last = sizes.num_sinks, sizes.num_sinks + num_evicted(stream)
    return max(num_gone, sum(first < end <= last for end in begins_of(stream)[1:]))


def in_words(stream: TextStream) -> str:
    """`the first 3 turns are out of the cache`; "" if none is."""
    num = num_forgotten(stream)
    if not num:
        return ""
    what = "the first turn is" if num == 1 else f"the first {num} turns are"
    aside = num_evicted(stream) <= stream.method.sizes.memory and not _num_gone(stream)
    return f"{what} out of the cache" + ", in the memory" * aside


def memory_offer(stream: TextStream) -> str:
    """Return what would keep the turns that go; "" where there is a memory, or none works."""
    method = stream.method
    if method.sizes.memory or EVICT in stream.notes:
        return ""
    works = _takes_memory(method, OFFERED)
    return f"--memory {OFFERED} keeps evicted tokens and takes back what is asked for" * works


def all_in_words(stream: TextStream) -> str:
    """Return which turns are in the cache and which are not, a line each."""
    sizes, num_out = stream.method.sizes, num_evicted(stream)
    num_turns, num_in = len(begins_of(stream)), stream.num_fed - num_out
    lines = [
        f"conversation: {num_turns} turns, {len(stream.ids)} tokens",
        f"in the cache: {num_in} tokens, at most {sizes.cache_size}; the first "
        f"{sizes.num_sinks} are never evicted",
        f"out of the cache: {num_out} tokens"
        + (f" ({in_words(stream)})" * bool(num_forgotten(stream))),
    ]
    if sizes.memory:
        num = min(num_out, sizes.memory)
        lines.append(f"in the memory: {num} tokens, at most {sizes.memory}, to be taken back")
    elif offer := memory_offer(stream):
        lines.append(f"in a memory: none; {offer}, which is slower")
    return "\n".join(lines)


def _takes_memory(method: Method, num: int) -> bool:
    """Return whether a method with these sizes could have a memory of so many tokens."""
    from kvalign.memory.memories import Memories
    from kvalign.methods.cached import Cached

    if not isinstance(method, Cached):
        return False
    try:
        sizes = replace(method.sizes, memory=num, num_recalled=None)
        of_model = method.places_by, method.model.config, method.num_positions
        Memories(method.spec, sizes, *of_model)
    except UserError:
        return False
    return True
