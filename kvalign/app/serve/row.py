"""One answer that is being written, and who is told of it."""

import time
from collections.abc import Callable, Collection

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvalign.streaming.answer import Answer
from kvalign.streaming.sampling import Sampling


class Row:
    """One answer of a turn.

    Args:
        sampling: how its tokens are chosen; `max_new_tokens` and `stop_strings` end it.
        index: its number among the answers of a request; it draws with seed + `draw`.
        ids: [T] int64, all that came before it.
        ends: tokens that end it.
        show: told of its text as it comes.

    Attributes:
        token_ids: what was chosen.
        text: what was shown.
        finish: empty while it goes on; `stop`, `length`; `sick` or `failed` where it cannot.
        since_s: when its last token came; at first, when it was asked for.
    """

    def __init__(
        self,
        sampling: Sampling,
        index: int,
        ids: Tensor,
        tokenizer: PreTrainedTokenizerBase,
        ends: Collection[int],
        device: torch.device,
        show: Callable[[int, str], None],
        draw: int = 0,
    ):
        self.index, self._show = index, show
        self.text, self.finish, self.since_s = "", "", time.perf_counter()
        self.chooser = sampling.chooser(ids[None].to(device), draw)
        self._answer = Answer(tokenizer, ids.tolist(), sampling, ends)
        self.token_ids = self._answer.token_ids

    @property
    def is_whole(self) -> bool:
        """Whether it has ended as it should."""
        return self.finish in ("stop", "length")

    def take(self, token: int) -> None:
        """Go on with a token that was chosen."""
        if not self.chooser.is_bare:  # which looks at nothing that came before
            self.chooser.append(token)
        _, shown = self._answer.take(token)
        self.finish = self._answer.finish
        if shown:
            self.text += shown
            self._show(self.index, shown)
