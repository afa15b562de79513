"""Lookup decoding: text that repeats earlier text of the stream is written several tokens per pass.

The last few tokens may have occurred before. Then the tokens that followed them are guessed to
follow again. The model reads the guesses together with the last token, as one segment, and the
cache stores them beyond its end. Each token is chosen as usual from the logits after the one
before. If it equals the guess, the next logits are already there. So the text is the same under any
sampling. (Prompt lookup decoding, Saxena 2023, is a case of speculative decoding, Leviathan et al.
2023, with the stream itself as draft.)
"""

from collections.abc import Iterable

import torch
from torch import Tensor

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

    Args:
        most: most tokens that are guessed at a time.
        ids: of the stream so far.

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
        assert isinstance(method.cache, StreamingCache)
        token = self._ids[-1]
        logits = method.cache.take_ahead(token)
        if logits is not None:
            return logits
        fed = [token, *self.guess()][: max(1, method.cache.most_at_once)]
        ids = torch.tensor([fed], device=method.model.device)
        return method.feed(ids) if len(fed) == 1 else method.read_ahead(ids)


def check_lookup(method: Method) -> None:
    """Raise UserError unless a method can undo guesses."""
    if not (isinstance(method, Cached) and method.reads_ahead):
        raise UserError(
            f"lookup does not work with {method.in_words}, which cannot undo a wrong guess: use "
            "kvalign with tables, streaming-llm or window, without a memory or another policy"
        )
