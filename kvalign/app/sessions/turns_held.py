"""Turns of a conversation that its cache still has, and a line about the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvalign.streaming.text_stream import TextStream

# Notes of a stream: how many tokens came before each turn; what goes when the cache is full; how
# many turns have gone as a whole.
TURNS, EVICT, NUM_GONE = "turns", "evict", "gone"


def note_turn(stream: TextStream, num_before: int) -> None:
    """Note that a turn begins after so many tokens."""
    stream.notes[TURNS] = f"{stream.notes.get(TURNS, '')} {num_before}".strip()


def begins_of(stream: TextStream) -> list[int]:
    """The tokens that came before each turn; of a file that does not say, none."""
    return [int(word) for word in stream.notes.get(TURNS, "").split() if word.isdecimal()]


def evict_turns(stream: TextStream, system: str | None, *, special_tokens: bool) -> None:
    """Let the oldest turns go, as a whole, until the one that was fed last fits; what stays is
    encoded anew.
    """
    from kvalign.streaming.turns import asked_from, first_that_fits, opening_len

    how = {"special_tokens": special_tokens}
    num_gone, num_opening = _num_gone(stream), opening_len(stream.tokenizer, system, **how)
    begins = asked_from(stream.tokenizer, begins_of(stream)[num_gone:], system, **how)
    size = stream.method.sizes.cache_size
    num_answer = stream.sampling.max_new_tokens or size
    more = first_that_fits(begins, len(stream.ids), num_opening, size, num_answer)
    if more:
        stream.notes[NUM_GONE] = str(num_gone + more)
        stream.encode_anew(stream.ids[:num_opening] + stream.ids[begins[more] :])


def _num_gone(stream: TextStream) -> int:
    said, num_turns = stream.notes.get(NUM_GONE, ""), len(begins_of(stream))
    return min(int(said), max(0, num_turns - 1)) if said.isdecimal() else 0


def num_evicted(stream: TextStream) -> int:
    """Tokens that are out of the cache; 0 of a method of the user's own that does not say."""
    try:
        return stream.num_evicted
    except NotImplementedError:
        return 0


def num_forgotten(stream: TextStream) -> int:
    """Turns, the first ones, of which no more is in the cache than the sinks. Other policies than
    `oldest` evict some of each turn: there none is but those that have gone as a whole.
    """
    sizes, num_gone = stream.method.sizes, _num_gone(stream)
    if not sizes.is_oldest:
        return num_gone
    first, last = sizes.num_sinks, sizes.num_sinks + num_evicted(stream)
    return max(num_gone, sum(first < end <= last for end in begins_of(stream)[1:]))


def in_words(stream: TextStream) -> str:
    """`the first 3 turns are out of the cache`; "" where none is."""
    num = num_forgotten(stream)
    if not num:
        return ""
    what = "the first turn is" if num == 1 else f"the first {num} turns are"
    aside = num_evicted(stream) <= stream.method.sizes.memory and not _num_gone(stream)
    return f"{what} out of the cache" + ", in the memory" * aside


def memory_offer(stream: TextStream) -> str:
    """Return what would keep the turns that go; "" where there is a memory, or none works."""
    from kvalign.methods.cached import Cached

    method = stream.method
    if method.sizes.memory or EVICT in stream.notes:
        return ""
    works = isinstance(method, Cached) and method.is_exact and method.places_by is not None
    return "--memory 100000 keeps evicted tokens and takes back what is asked for" * works


def all_in_words(stream: TextStream) -> str:
    """Return which turns are held and which are not, a line each."""
    sizes, num_out = stream.method.sizes, num_evicted(stream)
    num_turns, num_in = len(begins_of(stream)), stream.num_fed - num_out
    lines = [
        f"said: {num_turns} turns, {len(stream.ids)} tokens",
        f"in the cache: {num_in} tokens, of {sizes.cache_size} at most; the first "
        f"{sizes.num_sinks} never go",
        f"out of it: {num_out} tokens" + (f" ({in_words(stream)})" * bool(num_forgotten(stream))),
    ]
    if sizes.memory:
        held = min(num_out, sizes.memory)
        lines.append(f"in the memory: {held} tokens, of {sizes.memory} at most, to be taken back")
    elif offer := memory_offer(stream):
        lines.append(f"in a memory: none; {offer}, which is slower")
    return "\n".join(lines)
