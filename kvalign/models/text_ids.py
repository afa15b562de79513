"""Text as token ids: the one place where text becomes ids.

Text in is text out: tokens of a text are those of its characters, wherever it comes from. So a text
that goes on gets no space in front, one that begins with the tokenizer's prefix tokens gets them
once, and none gets the tokens that some tokenizers put after a text, which would end it.
"""

from collections.abc import Callable, Mapping

from transformers import PreTrainedTokenizerBase

from kvalign.foundation.escape import check_text
from kvalign.models.control_tokens import encoder_of_masked
from kvalign.models.prefix_tokens import prefix_ids

# What may stand before a text that goes on. A tokenizer that merges one of them with the text's
# first character does not merge another.
_BEFORE = ("\n", ".", "a", "0")

Encoder = Callable[[str], list[int]]


def ids_of(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prefix: bool,
    goes_on: bool = False,
    masks: Mapping[str, str] | None = None,
) -> list[int]:
    """The token ids of a text.

    Args:
        prefix: put the tokenizer's prefix tokens before it, unless it begins with them.
        goes_on: it continues another text, so a tokenizer that puts a space before each text
            (SentencePiece) puts none here.
        masks: characters that stand for special tokens, to be read as plain text, and those tokens
            (`kvalign.models.control_tokens`).

    Raises:
        UserError: it has no UTF-8 form.
    """
    check_text(text)

    def plain(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    encode = encoder_of_masked(masks, tokenizer) if masks else plain
    ids = _ids_after(text, encode) if goes_on else encode(text)
    opening = prefix_ids(tokenizer) if prefix else []
    return ids if ids[: len(opening)] == opening else [*opening, *ids]


def _ids_after(text: str, encode: Encoder) -> list[int]:
    """The ids of a text after another one: without the space that some tokenizers put in front.

    A tokenizer of whole words makes one word of two texts that meet without a space, so it has no
    ids for the second one: there each text is encoded alone.
    """
    after = _after_another("a", encode)
    return _after_another(text, encode) if after and after != encode("a") else encode(text)


def _after_another(text: str, encode: Encoder) -> list[int]:
    for before in _BEFORE:
        alone, both = encode(before), encode(before + text)
        if alone and both[: len(alone)] == alone:
            return both[len(alone) :]
    return encode(text)
