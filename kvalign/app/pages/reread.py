"""Second reading of a stream: the model reads the text that a method wrote, without stale entries.
The result is the perplexity of `recompute` over the new tokens, as in `kvalign eval perplexity`.

To cost less than the writing, its window moves by a quarter at a time. So each token is read after
the last 3/4 C to C tokens before it.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from kvalign.methods import make_method
from kvalign.streaming.health import perplexity_of
from kvalign.streaming.scoring import score


class Reread:
    """Reader of one stream with a cache of C entries, as it grows.

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
