"""Choice of a stream's next token from its method's logits. Only this module chooses tokens."""

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from kvalign.foundation.lasting import lasting
from kvalign.methods.base import Method
from kvalign.streaming.health import most_likely, no_token


class Chooser:
    """Chooser of tokens for rows that advance together; it knows all tokens before them.

    Args:
        ids: [B, T] int64, the tokens before.
        processors: transformers' logits processors; they see all ids.
        do_sample: draw from the processed distribution; otherwise take the most likely token.
        generator: source of the draws; None: torch's global one.
    """

    def __init__(
        self,
        ids: Tensor,
        processors: LogitsProcessorList | None = None,
        do_sample: bool = False,
        generator: torch.Generator | None = None,
    ):
        self.processors, self.do_sample, self.generator = processors, do_sample, generator
        self._ids, self._len = ids, ids.shape[1]

    @property
    def ids(self) -> Tensor:
        """All ids so far [B, T]."""
        return self._ids[:, : self._len]

    def choose(self, logits: Tensor, method: Method) -> Tensor:
        """The next token of each row [B] int64, from logits [B, V]; RunError without one."""
        scores = self.processors(self.ids, logits) if self.processors else logits
        token, is_one = most_likely(scores)
        if not is_one.all():
            raise no_token(logits, method)
        if self.do_sample:
            token = torch.multinomial(scores.softmax(-1), 1, generator=self.generator)[:, 0]
        return token

    def append(self, token: Tensor | int) -> None:
        """Append chosen tokens [B]. The buffer of ids doubles when it is full, so an endless stream
        is not copied at each token.
        """
        if self._len == self._ids.shape[1]:
            with lasting():
                self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)], 1)
        self._ids[:, self._len] = token
        self._len += 1
