"""Text of a stream's tokens, piece by piece, and its end."""

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

from kvalign.streaming.decoder import Decoder
from kvalign.streaming.sampling import Sampling


class Answer:
    """Answer to an input: tokens, their text, and the reason for its end.

    Args:
        before: ids before the answer, so that a word in the middle keeps its space.
        sampling: `max_new_tokens` and `stop_strings` end it.

    Attributes:
        token_ids: its tokens so far.
        finish: reason for its end: `stop` (an end token or a stop string), `length`
            (max_new_tokens); empty while it continues.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        before: Sequence[int],
        sampling: Sampling,
        end_ids: Collection[int],
    ):
        assert isinstance(sampling.stop_strings, tuple)
        self.token_ids: list[int] = []
        self.finish = ""
        self._pieces: list[str] = []
        self._most, self._end_ids = sampling.max_new_tokens, end_ids
        self._stops = StopStrings(sampling.stop_strings) if sampling.stop_strings else None
        self._decoder = Decoder(tokenizer, before)

    def take(self, token: int) -> tuple[str, str]:
        """Append a token.

        Returns:
            The next piece of text, empty while the token is part of a character; and the text so
            far that can be shown, without stop strings or the possible beginning of one.
        """
        self.token_ids.append(token)
        piece = self._decoder.step(token)
        self._pieces.append(piece)
        is_end = token in self._end_ids
        stops = self._stops
        text = "" if is_end else stops.read(piece) if stops else piece
        if is_end or (stops and stops.has_stopped):
            self.finish = "stop"
        elif self._most and len(self.token_ids) >= self._most:
            self.finish = "length"
        return piece, text + stops.rest() if stops and self.finish else text

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def has_end_token(self) -> bool:
        return bool(self.token_ids) and self.token_ids[-1] in self._end_ids


class StopStrings:
    """Search for texts in a text that comes in pieces. The possible beginning of one is held back;
    once one was found, it `has_stopped`.
    """

    def __init__(self, strings: tuple[str, ...]):
        self._strings, self._tail, self.has_stopped = strings, "", False
        self._longest = max(map(len, strings), default=1)

    def read(self, piece: str) -> str:
        """Return the text that can be shown now: up to the first stop string."""
        text, self._tail = self._tail + piece, ""
        starts = [start for string in self._strings if (start := text.find(string)) >= 0]
        if starts:
            self.has_stopped = True
            return text[: min(starts)]
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(string.startswith(text[start:]) for string in self._strings):
                self._tail = text[start:]
                return text[:start]
        return text

    def rest(self) -> str:
        """Return the held-back text when no more comes."""
        text, self._tail = self._tail, ""
        return text
