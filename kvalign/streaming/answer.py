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


def special_names(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Names of the special tokens, by id."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {number: token.content for number, token in added.items() if token.special}


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """Return what a token writes in the middle of a text, in UTF-8; a part of a character is its
    bytes, a special token its name. A token that the tokenizer does not have is `<unused-ID>`.
    """
    backend, characters = tokenizer.backend_tokenizer, _byte_of()
    name, decoder = backend.id_to_token(token), str(backend.decoder)
    if name is None:
        return f"<unused-{token}>".encode()
    once, twice = (backend.decode([token] * num, skip_special_tokens=True) for num in (1, 2))
    if "ByteLevel" in decoder and set(name) <= characters.keys():
        return bytes(characters[one] for one in name) if twice else name.encode()
    if "ByteFallback" in decoder and (byte := _BYTE.fullmatch(name)):
        return bytes([int(byte[1], 16)])
    return (twice.removeprefix(once) or name).encode()


class Decoder:
    """Text of tokens that follow others. It never revises text that it has returned.

    A tokenizer may revise text. With byte fallback (Llama 2, Mistral), a byte that completes no
    character makes the bytes before it invalid, too. Then the returned text stays, and the later
    tokens are decoded alone.

    Args:
        tokenizer: a fast one.
        before: ids before the text. Those at the end that are not yet a whole character are decoded
            with the first token.
        spelled: special tokens that the text shows, by their names; it has no others.

    Attributes:
        special: names of the special tokens that it does not show, by id.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        before: Sequence[int],
        spelled: Collection[int] = (),
    ):
        self._text = partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
        names = special_names(tokenizer)
        self._spelled = {token: names.pop(token) for token in spelled if token in names}
        self.special = names
        # The last text, so that a word keeps its space, and what has not been given yet.
        self._context, self._waiting = self._cut([*before[-2 * _MOST :]])
        self._context_text = self._text(self._context)

    def step(self, token: int) -> str:
        """The text that a token adds; none while it is part of a character."""
        if token in self.special:
            return ""
        if token in self._spelled:
            return self._take(is_last=True) + self._spelled[token]
        self._waiting.append(token)
        return self._take(is_last=len(self._waiting) == _MOST)

    def _take(self, is_last: bool) -> str:
        """The text of the tokens that wait; none if it is not whole, unless it is the last."""
        before, whole = self._context_text, self._text(self._context + self._waiting)
        is_whole = whole != before and not whole.endswith(_NO_CHARACTER)
        if not is_whole and not is_last:
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
        spelled: special tokens that its text shows, as of `Decoder`.

    Attributes:
        token_ids: its tokens so far.
        finish: reason for its end: `stop` (an end token or a stop string), `length`
            (max_new_tokens); empty while it continues.
        most: tokens after which it ends; None: any number.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        before: Sequence[int],
        sampling: Sampling,
        end_ids: Collection[int],
        spelled: Collection[int] = (),
    ):
        assert isinstance(sampling.stop_strings, tuple)
        self.token_ids: list[int] = []
        self.finish = ""
        self._pieces: list[str] = []
        self.most, self._end_ids = sampling.max_new_tokens, end_ids
        self._stops = StopStrings(sampling.stop_strings) if sampling.stop_strings else None
        self._decoder = Decoder(tokenizer, before, spelled)

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
        stops, text = self._stops, "" if is_end else piece
        if stops:
            hidden = self._decoder.special.get(token, piece) if is_end or not piece else ""
            text = stops.read(text, hidden)
        if is_end or (stops and stops.has_stopped):
            self.finish = "stop"
        elif self.most and len(self.token_ids) >= self.most:
            self.finish = "length"
        return piece, text + stops.rest() if stops and self.finish else text

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def has_end_token(self) -> bool:
        return bool(self.token_ids) and self.token_ids[-1] in self._end_ids


class StopStrings:
    """Search for texts in a text that comes in pieces, with its special tokens, which are hidden,
    and without them. The possible beginning of one is held back; once one was found, it
    `has_stopped`.
    """

    def __init__(self, strings: tuple[str, ...]):
        self._strings, self.has_stopped = strings, False
        self._tail: list[tuple[str, bool]] = []  # characters held back, and whether they are shown
        self._longest = max(map(len, strings))

    def read(self, shown: str, hidden: str = "") -> str:
        """Return the text that can be shown now: up to the first stop string.

        Args:
            shown, hidden: the next piece of the text, of which the hidden part is only searched.
        """
        tail = [*self._tail, *((x, True) for x in shown), *((x, False) for x in hidden)]
        founds, end = list[int](), len(tail)
        for places in (range(len(tail)), [i for i, (_, is_shown) in enumerate(tail) if is_shown]):
            text = "".join(tail[i][0] for i in places)
            starts = (text.find(string) for string in self._strings)
            founds += (places[start] for start in starts if start >= 0)
            for start in range(max(0, len(text) - self._longest + 1), len(text)):
                if any(string.startswith(text[start:]) for string in self._strings):
                    end = min(end, places[start])
                    break
        end = min(founds, default=end)
        # Hidden text is searched no longer once the longest string has room behind it.
        rest = [] if founds else tail[end:]
        self._tail = [x for i, x in enumerate(rest) if x[1] or i >= len(rest) - self._longest]
        self.has_stopped = bool(founds)
        return _shown(tail[:end])

    def rest(self) -> str:
        """Return the held-back text when no more comes."""
        tail, self._tail = self._tail, []
        return _shown(tail)


def _shown(tail: list[tuple[str, bool]]) -> str:
    return "".join(character for character, is_shown in tail if is_shown)
