"""One answer that is being written: how its tokens are chosen, and its text."""

import time
from collections.abc import Callable, Collection

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvalign.streaming.generation import History
from kvalign.streaming.sampling import Sampling

_OVERLAP = 16  # tokens that tell a decoder in the middle of a text what came before


class HeldBack:
    """Text that comes in pieces, shown up to the first stop string: what may be the beginning of
    one waits.

    Attributes:
        found: whether one has come.
    """

    def __init__(self, strings: tuple[str, ...]):
        self._strings, self._held, self.found = strings, "", False

    def read(self, piece: str) -> str:
        """What can be shown now."""
        text, self._held = self._held + piece, ""
        places = [place for string in self._strings if (place := text.find(string)) >= 0]
        if places:
            self.found = True
            return text[: min(places)]
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(string.startswith(text[start:]) for string in self._strings):
                self._held = text[start:]
                return text[:start]
        return text

    def rest(self) -> str:
        """What waited, once nothing more comes."""
        text, self._held = self._held, ""
        return text

    @property
    def _longest(self) -> int:
        return max(map(len, self._strings), default=1)


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
        assert isinstance(sampling.stop_strings, tuple)
        self.sampling, self.index, self.ends, self._show = sampling, index, ends, show
        self.token_ids: list[int] = []
        self.text, self.finish, self.since_s = "", "", time.perf_counter()
        self.processors = sampling.processors()
        self.is_plain = sampling.is_greedy and not self.processors
        self.generator = None if self.is_plain else sampling.generator(device, draw)
        looks_back = sampling.repetition_penalty != 1 or sampling.no_repeat_ngram_size
        before = ids if looks_back else ids[-1:]
        self.history = History(before[None].to(device))
        self._held = HeldBack(sampling.stop_strings)
        self._backend = tokenizer.backend_tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        for token in ids[-_OVERLAP:].tolist():
            self._decoder.step(self._backend, token)

    @property
    def is_whole(self) -> bool:
        """Whether it has ended as it should."""
        return self.finish in ("stop", "length")

    @property
    def token(self) -> int:
        """The one to be fed next."""
        return self.token_ids[-1]

    def choose(self, logits: Tensor) -> int:
        """The next token, of logits [1, V]."""
        scores = self.processors(self.history.ids, logits)
        if self.sampling.is_greedy:
            return int(scores.argmax(-1))
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self.generator))

    def take(self, token: int) -> None:
        """Go on with a token that was chosen."""
        self.token_ids.append(token)
        if not self.is_plain:
            self.history.append(torch.tensor([token], device=self.history.ids.device))
        if token in self.ends:
            self.finish = "stop"
        else:
            self._say(self._held.read(self._decoder.step(self._backend, token) or ""))
            if self._held.found:
                self.finish = "stop"
            elif len(self.token_ids) == self.sampling.max_new_tokens:
                self.finish = "length"
        if self.finish:
            self._say(self._held.rest())

    def _say(self, piece: str) -> None:
        if piece:
            self.text += piece
            self._show(self.index, piece)
