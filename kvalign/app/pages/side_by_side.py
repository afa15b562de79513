"""Several methods that continue one prompt side by side. They take turns of one or a few tokens.

The time of a token covers only the step that made it, not the turns of others.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Unpack

import torch
from transformers import PreTrainedModel

from kvalign.eval.judging.words import RULES
from kvalign.foundation.errors import UserError
from kvalign.foundation.names import spelled_out
from kvalign.methods import make_method
from kvalign.methods.base import Method
from kvalign.methods.registry import METHODS
from kvalign.models.loading import LoadedModel
from kvalign.streaming.sampling import Sampling, StreamConfig
from kvalign.streaming.scoring import perplexity_of, score
from kvalign.streaming.text_stream import TextStream

if TYPE_CHECKING:  # NLTK takes a second to import, and the page opens without it
    from kvalign.eval.judging.chunks import Chunk

SHOWN_EVERY_S = 0.12
LEAST_TOKENS = 200  # shorter texts tell little of a method
WORK_PER_SHOWING = 3  # seconds of streaming for each that goes into showing it


@dataclass(frozen=True)
class View:
    """State of one stream."""

    title: str
    about: str
    policy: str  # what it evicts and what becomes of that and the others; empty: the usual
    text: str
    chunks: list[Chunk]  # finished ones: while it writes, the last one of the text is not
    num_tokens: int
    tokens_per_s: float  # of its own steps after the first; 0: unknown yet
    perplexity: float | None  # of its text, read again with nothing stale; None: unknown yet
    fill: int  # entries that the next token finds
    cache_size: int
    num_evictions: int  # times that `num_evicted` entries were dropped
    num_evicted: int
    is_done: bool

    @property
    def readable(self) -> float | None:
        """Share of readable chunks; None before the first is finished."""
        if not self.chunks:
            return None
        return sum(chunk.is_readable for chunk in self.chunks) / len(self.chunks)

    @property
    def pieces(self) -> list[Piece]:
        """Text in readable form, in parts."""
        return list(pieces(self.text, self.chunks))


@dataclass(frozen=True)
class Refusal:
    """Method that cannot stream with these settings, and the reason in one line."""

    title: str
    about: str
    line: str


class Reread:
    """Reader of one stream with a cache of C entries, as it grows: the model reads the text that a
    method wrote, without stale entries. The result is the perplexity of `recompute` over the new
    tokens, as in `kvalign eval perplexity`. To cost less than the writing, its window moves by a
    quarter at a time.

    `first` is the index of the first answer's first token in the stream. Tokens that fit into the
    cache are not read, because methods do not differ there.
    """

    def __init__(self, model: PreTrainedModel, cache_size: int, first: int):
        self.step = max(1, cache_size // 4)
        self._method = make_method("recompute", model, cache_size=cache_size, num_evicted=self.step)
        self._next = max(first, cache_size + 1)
        self._nll, self.num_read = 0.0, 0

    def read(self, ids: Sequence[int], is_done: bool = False) -> None:
        """Read on by quarters of a window, and the rest when the stream is finished."""
        num_new = len(ids) - self._next
        num_new -= 0 if is_done else num_new % self.step
        if num_new <= 0:
            return
        begin = self._next - self._method.sizes.first_input_len
        window = torch.tensor([ids[begin : self._next + num_new]], device=self._method.model.device)
        self._nll += float(score(self._method, window).sum())
        self.num_read += num_new
        self._next += num_new

    @property
    def perplexity(self) -> float | None:
        """exp of the mean loss; None before anything was read."""
        return perplexity_of(self._nll / self.num_read) if self.num_read else None


@spelled_out(StreamConfig)
def begin(
    loaded: LoadedModel,
    prompt: str,
    methods: Sequence[str],
    *,
    cache_size: int,
    **config: Unpack[StreamConfig],
) -> list[TextStream | Refusal]:
    """A stream for each method, fed with the prompt, or its refusal; nothing is computed yet.

    `config` is that of `kvalign.stream`; each method takes the settings that apply to it. Without a
    seed one is drawn, the same for all. UserError says what is wrong for all of them.
    """
    if not prompt.strip():
        raise UserError("the prompt is empty: give at least one word")
    if not methods:
        raise UserError("no method is chosen: select at least one")
    sampling, settings = Sampling.of(begin, config)
    aligner = settings.pop("aligner", None)
    streams: list[TextStream | Refusal] = []
    for name in methods:
        cls = METHODS.find(name)
        own = {size: x for size, x in settings.items() if size not in cls.ignored_settings()}
        try:
            method = make_method(
                name,
                loaded.model,
                cache_size=cache_size,
                aligner=aligner if cls.takes_aligner else None,
                warn=False,
                **own,
            )
            text_stream = TextStream(loaded.tokenizer, method, sampling)
        except UserError as error:
            streams.append(Refusal(name, cls.about, str(error)))
        else:
            text_stream.feed(prompt)
            streams.append(text_stream)
    return streams


def side_by_side(
    streams: Sequence[TextStream | Refusal],
    words: frozenset[str],
    shown_every_s: float = SHOWN_EVERY_S,
) -> Iterator[list[View | Refusal]]:
    """Run streams in turns and report their state now and then, also at the beginning and the end.
    Closing the iterator stops the work.

    Args:
        streams: not yet iterated; one that refuses the prompt becomes a refusal.
        words: the words for the rule of readability.
        shown_every_s: least seconds between two reports; more if showing takes long.
    """
    writing = {one: iter(one) for one in streams if isinstance(one, TextStream)}
    refused: dict[TextStream, Refusal] = {}
    rereads = {
        one: Reread(one.method.model, one.method.sizes.cache_size, len(one.ids)) for one in writing
    }

    def views() -> list[View | Refusal]:
        return [
            one
            if isinstance(one, Refusal)
            else refused.get(one) or _view(one, words, rereads[one].perplexity, one not in writing)
            for one in streams
        ]

    yield views()
    shown_at, pause_s = time.perf_counter(), shown_every_s
    while writing:
        for one, text in list(writing.items()):
            try:
                is_done = next(text, None) is None
            except UserError as error:
                refused[one] = Refusal(one.method.title, one.method.about, str(error))
                is_done = True
            if is_done:
                del writing[one]
            rereads[one].read(one.ids, is_done=one not in writing)
        start = time.perf_counter()
        if writing and start - shown_at >= pause_s:
            yield views()
            shown_at = time.perf_counter()
            pause_s = max(shown_every_s, WORK_PER_SHOWING * (shown_at - start))
    yield views()


def verdict(views: Sequence[View | Refusal]) -> str | None:
    """Perplexities of finished texts in words, the lowest first; None for fewer than two."""
    done = [one for one in views if isinstance(one, View) and one.is_done]
    read = sorted((one.perplexity, one.title) for one in done if one.perplexity is not None)
    if len(read) < 2:
        return None
    (least, first), *others = read
    times = [f"that of {title} {perplexity / least:.1f} times" for perplexity, title in others]
    few = min(one.num_tokens for one in done) < LEAST_TOKENS
    return (
        f"The text of {first} surprises the model least when it reads it again (perplexity "
        f"{least:.1f}), {', '.join(times)} as "
        f"much{': few tokens, so this may be chance' if few else ''}."
    )


def _view(
    stream: TextStream, words: frozenset[str], perplexity: float | None, is_done: bool
) -> View:
    from kvalign.eval.judging.chunks import chunks

    method, text, timing = stream.method, stream.text, stream.timing()
    all_chunks = chunks(text, words, RULES["paper"])
    return View(
        title=method.title,
        about=method.about,
        policy=_policy(method),
        text=text,
        chunks=all_chunks if is_done else all_chunks[:-1],
        num_tokens=len(stream.token_ids),
        tokens_per_s=1e3 / timing["ms_per_token"] if timing["ms_per_token"] else 0.0,
        perplexity=perplexity,
        fill=method.fill,
        cache_size=method.sizes.cache_size,
        num_evictions=(stream.num_fed - method.fill) // method.sizes.num_evicted,
        num_evicted=method.sizes.num_evicted,
        is_done=is_done,
    )


def _policy(method: Method) -> str:
    """`policy key-norm`, `policy oldest, positions kept; the last one is reached`, `memory of
    100000 tokens, 16 taken back`.
    """
    sizes = method.sizes
    if sizes.memory:
        return f"memory of {sizes.memory} tokens, {sizes.num_recalled} taken back"
    if sizes.is_oldest:
        return ""
    if sizes.positions == "compact":
        return f"policy {sizes.policy}"
    end = "; the last one is reached" if method.tokens_left == 0 else ""
    return f"policy {sizes.policy}, positions kept{end}"


UNKNOWN = "[…]"
"""Replacement for a corpus's `<unk>`."""
_MARKS = re.compile(r" ?@([-,.])@ ?")
_HEADING = re.compile(r"^ *(?:= ?){1,4}(?=[^=\s])|(?: ?=){1,4} *$", re.MULTILINE)
# Spaces that only a tokenised text has: before a closing mark or an ending, after an opening one,
# around the end of a line.
_SPACES = re.compile(
    r" (?=[,.;:!?)\]%](?=\s|$)|['\u2019](?:s|t|d|m|re|ve|ll)\b|n['\u2019]t\b)|(?<=[(\[$£]) "
    r"| +(?=\n)|(?<=\n) +"
)
_IS_TOKENISED = re.compile(r"\w [,.](?=\s|$)")


class Piece(NamedTuple):
    """Part of a text with one style."""

    text: str  # as a reader expects it
    kind: str  # `readable` or `unreadable`; `tail` after the last chunk


def pieces(text: str, chunks: Sequence[Chunk]) -> Iterator[Piece]:
    """Parts of a text, cut after its chunks; the last one is the rest."""
    is_tokenised, end = _IS_TOKENISED.search(text) is not None, 0
    marks = [mark.span() for mark in _MARKS.finditer(text)]
    for chunk in chunks:
        stop = next((last for first, last in marks if first < chunk.end < last), chunk.end)
        kind = "readable" if chunk.is_readable else "unreadable"
        yield Piece(readable(text[end:stop], is_tokenised), kind)
        end = stop
    yield Piece(readable(text[end:], is_tokenised), "tail")


def readable(text: str, is_tokenised: bool) -> str:
    """Part of a text without marks."""
    text = _MARKS.sub(r"\1", text).replace("<unk>", UNKNOWN)
    return _SPACES.sub("", _HEADING.sub("", text)) if is_tokenised else text
