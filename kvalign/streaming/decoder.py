"""Decoding of tokens to whole characters, one by one. Only this module decodes."""

import re
from collections.abc import Sequence
from functools import cache, partial

from transformers import PreTrainedTokenizerBase

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
