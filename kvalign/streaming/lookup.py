"""Lookup decoding: text that repeats earlier text of the stream is written several tokens per pass.

The last few tokens may have occurred before. Then the tokens that followed them are guessed to
follow again. The model reads the guesses together with the last token, as one segment, and their
entries are put aside until their tokens come. Each token is chosen as usual from the logits after
the one before. If it equals the guess, the next logits are already there. So the text is the same
under any sampling. (Prompt lookup decoding, Saxena 2023, is a case of speculative decoding,
Leviathan et al. 2023, with the stream itself as draft.)
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from kvalign.aligners.entries import KV
from kvalign.cache.streaming_cache import StreamingCache
from kvalign.foundation.errors import UserError
from kvalign.methods.base import Method
from kvalign.methods.cached import Cached

NGRAM_SIZE = 3
LEAST_TRUST = 0.7
FORGETTING = 0.2


class Lookup:
    """Guesses of how a stream continues.

    A source is a place in the stream with the same last tokens. It is followed as long as its
    guesses are right. Then the newest place of the last `NGRAM_SIZE` tokens becomes the source. The
    number of guesses is the number of equal tokens so far. While most guesses are wrong, whether
    they are used or not, there are none: a wrong one costs a pass over several tokens.

    Attributes:
        trust: recent share of right guesses, between 0 and 1.
    """

    def __init__(self, most: int, ids: Iterable[int]):
        self.most, self.trust = most, LEAST_TRUST
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # of an n-gram: where its newest place ends
        self._source: int | None = None  # the place of the token that is guessed next
        self._num_same = 0  # tokens before it that are those before the next one
        for token in ids:
            self.append(token)

    def append(self, token: int) -> None:
        """Append a token."""
        if self._source is not None:
            is_right = self._ids[self._source] == token
            self.trust += FORGETTING * (is_right - self.trust)
            self._source = self._source + 1 if is_right else None
            self._num_same += 1
        self._ids.append(token)
        ngram = tuple(self._ids[-NGRAM_SIZE:])
        if self._source is None:
            self._source, self._num_same = self._ends.get(ngram), NGRAM_SIZE
        self._ends[ngram] = len(self._ids)

    def guess(self) -> list[int]:
        """The next tokens, as far as they can be guessed; repetitions are guessed to repeat."""
        if self._source is None or self.trust < LEAST_TRUST:
            return []
        num = min(self.most, self._num_same)
        followers = self._ids[self._source : self._source + num]
        return (followers * -(-num // len(followers)))[:num]

    def feed(self, method: Method) -> Tensor:
        """Return the same logits [1, V] float32 as `method.feed` of the last token."""
        assert isinstance(method, Cached)
        token = self._ids[-1]
        logits = take_ahead(method.cache, token)
        if logits is not None:
            return logits
        tokens = [token, *self.guess()][: max(1, most_at_once(method.cache))]
        ids = torch.tensor([tokens], device=method.model.device)
        return method.feed(ids) if len(tokens) == 1 else read_ahead(method, ids)


class Ahead(NamedTuple):
    """Tokens that a cache has read beyond its last one. They do not count until they come."""

    ids: list[int]
    logits: Tensor  # [T, V] float32, after each of them
    entries: list[KV]  # as each layer with attention stores them


def read_ahead(method: Cached, ids: Tensor) -> Tensor:
    """Read the first of ids [1, T] and the others, which are guessed, in the same pass: at most
    `most_at_once`.

    The cache is then as if only the first had been fed. `take_ahead` makes a guess count; any other
    token lets go of them.

    Returns:
        logits [1, V] after the first.
    """
    cache, num = method.cache, ids.shape[1]
    logits = method.feed_segment(ids, num_ahead=num - 1).float()
    cache.ahead = Ahead(ids[0, 1:].tolist(), logits[0, 1:], cache.guessed)
    return logits[:, 0]


def take_ahead(cache: StreamingCache, token: int) -> Tensor | None:
    """Accept a token that was read ahead: logits [1, V] after it; None if it was not."""
    if cache.ahead is None or cache.ahead.ids[:1] != [token]:
        return None
    ids, logits, entries = cache.ahead
    with cache.changing():
        slot = torch.tensor([cache.sizes.slot(cache.end)])
        for layer, own in zip(cache.attention, entries, strict=True):
            layer.entries.grow(cache.end + 1)
            layer.entries.data.put_at(slot.to(layer.device), own.slots(0, 1))
        cache.end += 1
        cache.seen = [n + 1 for n in cache.seen]
        others = [own.slots(1, len(ids) - 1) for own in entries]
        cache.ahead = Ahead(ids[1:], logits[1:], others)
    return logits[:1]


def most_at_once(cache: StreamingCache) -> int:
    """Tokens of a segment that stay stored, whatever it evicts; 0 before the sinks are full."""
    sizes = cache.sizes
    has_sinks = min(cache.seen, default=0) >= sizes.num_sinks
    return (sizes.cache_size + 1 - sizes.num_evicted) * has_sinks


def check_lookup(method: Method) -> None:
    """Raise UserError unless reading ahead equals decode steps, and can be undone."""
    if not isinstance(method, Cached) or not method.is_exact or method.sizes.memory:
        raise UserError(
            f"lookup does not work with {method.in_words}, which cannot undo a wrong guess: use "
            "kvalign with tables, streaming-llm or window, without a memory or another policy"
        )
