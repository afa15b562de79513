"""Text of a stream's tokens, piece by piece, and its end. Only this module decodes."""

import re
from collections.abc import Collection, Sequence
from functools import cache, partial

from transformers import PreTrainedTokenizerBase

from kvalign.streaming.sampling import Sampling

_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte in vocabularies of SentencePiece
_MOST = 16
"""Tokens that wait for a character to become whole, or are looked through for one that is; the
longest character takes 4."""


@cache
def _byte_of() -> dict[str, int]:
    """Bytes by the characters that stand for them in byte-level vocabularies (GPT-2)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """Return what a token writes in the middle of a text, in UTF-8; a part of a character is its
    bytes, a special token its name.
    """
    name = str(tokenizer.convert_ids_to_tokens(token))
    if token in tokenizer.all_special_ids:
        return name.encode()
    if byte := _BYTE.fullmatch(name):
        return bytes([int(byte[1], 16)])
    characters = _byte_of()
    if "ByteLevel" in str(tokenizer.backend_tokenizer.decoder) and set(name) <= characters.keys():
        return bytes(characters[one] for one in name)
    return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


class Decoder:
    """Text of tokens that follow others. It never revises text that it has returned.

    A tokenizer may revise text. With byte fallback (Llama 2, Mistral), a byte that completes no
    character makes the bytes before it invalid, too. Then the returned text stays, and the later
    tokens are decoded alone.

    Args:
        tokenizer: a fast one.
        before: ids before the text. Those at the end that are not yet a whole character are decoded
            with the first token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int]):
        self._text = partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
        # The last text, so that a word keeps its space, and what has not been given yet.
        self._context, self._waiting = self._cut([*before[-2 * _MOST :]])
        self._context_text = self._text(self._context)

    def step(self, token: int) -> str:
        """The text that a token adds; none while it is part of a character."""
        self._waiting.append(token)
        before, whole = self._context_text, self._text(self._context + self._waiting)
        is_whole = whole != before and not whole.endswith(_NO_CHARACTER)
        if not is_whole and len(self._waiting) < _MOST:
            return ""
        follows = whole.startswith(before)
        piece = whole.removeprefix(before) if follows else self._text(self._waiting)
        if is_whole:  # a space alone has no text: a tokenizer strips the first one
            alone = self._text(self._waiting)
            context = [] if alone else self._context
            self._context = [*context, *self._waiting][-2 * _MOST :]
            self._context_text = alone or self._text(self._context)
        self._waiting = []
        return piece

    def _cut(self, before: list[int]) -> tuple[list[int], list[int]]:
        """The last tokens that make whole characters, as few as do, and what follows them."""
        for end in range(len(before), max(len(before) - 4, 0), -1):
            for start in range(end - 1, max(end - _MOST, 0) - 1, -1):
                text = self._text(before[start:end])
                if text and not text.endswith(_NO_CHARACTER):
                    return before[start:end], before[end:]
        return before, []


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
        self._longest = max(map(len, strings))

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
