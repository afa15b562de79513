"""The text of a stream's tokens, in pieces as they come, and where it ends."""

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

from kvalign.streaming.decoder import Decoder
from kvalign.streaming.sampling import Sampling


class Answer:
    """Answer to an input: tokens, their text, and why it ends.

    Args:
        tokenizer: a fast one, which decodes token by token.
        before: ids that came before, so that a word in the middle keeps its space.
        sampling: `max_new_tokens` and `stop_strings` end it.
        end_ids: tokens that end it.

    Attributes:
        token_ids: its tokens so far.
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
        self._pieces: list[str] = []
        self._most, self._end_ids = sampling.max_new_tokens, end_ids
        self._stops = StopStrings(sampling.stop_strings)
        self._decoder = Decoder(tokenizer, before)

    def take(self, token: int) -> tuple[str, str]:
        """Go on with a token.

        Returns:
            The next piece of text, empty where the token is part of a character; and what can be
            shown of all so far where stop strings, and what may be the beginning of one, are not.
        """
        self.token_ids.append(token)
        piece = self._decoder.step(token)
        self._pieces.append(piece)
        shown = "" if self.has_end_token else self._stops.read(piece)
        return piece, shown + self._stops.rest() if self.finish else shown

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def has_end_token(self) -> bool:
        return bool(self.token_ids) and self.token_ids[-1] in self._end_ids

    @property
    def finish(self) -> str:
        """`stop`: by an end token or a stop string; `length`: by max_new_tokens; empty while it
        goes on.
        """
        if self.has_end_token or self._stops.found:
            return "stop"
        return "length" if self._most and len(self.token_ids) >= self._most else ""


class StopStrings:
    """Looks for texts in a text that comes in pieces; what may be the beginning of one waits.

    Attributes:
        found: whether one of them has come.
    """

    def __init__(self, strings: tuple[str, ...]):
        self._strings, self._held, self.found = strings, "", False
        self._longest = max(map(len, strings), default=1)

    def read(self, piece: str) -> str:
        """Return what can be shown now: text up to the first stop string."""
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
        """Return what waited, once nothing more comes."""
        text, self._held = self._held, ""
        return text
