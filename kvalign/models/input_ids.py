"""Token ids of inputs: the one place where text becomes ids.

Text in is text out: tokens of a text are those of its characters, wherever it comes from. So a text
that goes on gets no space in front, one that begins with the tokenizer's prefix tokens gets them
once, and none gets the tokens that some tokenizers put after a text, which would end it.

Special tokens of a chat template steer the model, those in users' text are plain text, such as
`<|im_end|>` here. Users' text goes through the template with a mask, one character, in place of
each special token. So the template can process it like any text, and all special tokens in its
output are the template's own. A copy of the tokenizer with only these special tokens then encodes
the output.
"""

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count

from tokenizers import AddedToken, Tokenizer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvalign.foundation.errors import UserError, check_text


def encoded(
    text: str | Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None,
    model: PreTrainedModel,
    *,
    goes_on: bool = False,
) -> list[int]:
    """The token ids of an input, which may be token ids; UserError: none, or not the model's.

    Args:
        tokenizer: None: ids need none.
        goes_on: a text continues another one, else it begins a stream.
    """
    if isinstance(text, str) and tokenizer is not None:
        ids = ids_of(text, tokenizer, prefix=not goes_on, goes_on=goes_on)
    elif isinstance(text, Sequence) and all(type(token) is int for token in text):
        ids = [token for token in text if isinstance(token, int)]
    else:
        raise UserError(
            f"the input must be text or a list of token ids, got {type(text).__name__} (messages: "
            "tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True); "
            "a tensor: ids[0].tolist())"
        )
    size = model.config.vocab_size
    if ids and not 0 <= min(ids) <= max(ids) < size:
        raise UserError(
            f"token ids must be below {size} for this model, got {min(ids)} to {max(ids)}: does "
            "the tokenizer belong to the model?"
        )
    if isinstance(text, str) or tokenizer is None:
        return ids
    if unknown := {*ids} & {*unknown_ids(tokenizer, size)}:
        raise UserError(f"token {min(unknown)} is not in the tokenizer, which has no text for it")
    return ids


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of ids up to a tokenizer's last token; it has fewer tokens if it has holes."""
    return 1 + max(tokenizer.get_vocab().values())


def unknown_ids(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Sequence[int]:
    """The tokens below `vocab_size` that a tokenizer does not have. Models have more logits than
    tokens (Qwen2.5: 151 936 of 151 665), and vocabularies have holes.
    """
    return _unknown_ids(tokenizer, len(tokenizer), vocab_size)


@lru_cache(maxsize=4)
def _unknown_ids(
    tokenizer: PreTrainedTokenizerBase, num_tokens: int, vocab_size: int
) -> Sequence[int]:
    return sorted({*range(vocab_size)} - {*tokenizer.get_vocab().values()})


def check_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError for a tokenizer that cannot decode token by token."""
    if not getattr(tokenizer, "is_fast", False):
        kind = type(tokenizer).__name__
        raise UserError(f"a stream of text needs a fast tokenizer, got a {kind}")


# What may stand before a text that goes on. A tokenizer that merges one of them with the text's
# first character does not merge another.
_BEFORE = ("\n", ".", "a", "0")
_PRIVATE = 0xF0000  # the first of the characters that mean nothing

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
        masks: as of `masked`.
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


def masked(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[str], dict[str, str]]:
    """Texts with masks for special tokens, and the token of each; none without special tokens."""
    masks: dict[str, str] = {}
    free, without = unused_in(texts), []
    for text in texts:
        check_text(text)
        pieces, position = [], 0
        for start, end, _ in _special_in(text, tokenizer):
            if text[start:end] not in masks:
                masks[text[start:end]] = next(free)
            pieces += [text[position:start], masks[text[start:end]]]
            position = end
        without.append("".join([*pieces, text[position:]]))
    return without, {mask: token for token, mask in masks.items()}


def unused_in(texts: Sequence[str]) -> Iterator[str]:
    """Characters that mean nothing and are in none of these texts, without end."""
    return (one for one in map(chr, count(_PRIVATE)) if not any(one in text for text in texts))


def encoder_of_masked(
    masks: Mapping[str, str], tokenizer: PreTrainedTokenizerBase
) -> Callable[[str], list[int]]:
    """Function from a text to ids: special tokens are special, masks stand for their plain text."""
    splitter, placeholders = _splitter_of(tokenizer, len(tokenizer), str(tokenizer.chat_template))
    own = {name: token for token, name in placeholders.items()}

    def encode(text: str) -> list[int]:
        pieces, position = [], 0
        for start, end, token in _special_in(text, tokenizer):
            pieces += [text[position:start], placeholders[token]]
            position = end
        whole = "".join([*pieces, text[position:]])
        for mask, stands_for in masks.items():
            whole = whole.replace(mask, stands_for)
        encoding = splitter.encode(whole, add_special_tokens=False)
        # By their words: in a vocabulary with holes they have the numbers of other tokens.
        return [own.get(x.strip(), i) for x, i in zip(encoding.tokens, encoding.ids, strict=True)]

    return encode


def special_of(tokenizer: PreTrainedTokenizerBase) -> dict[int, AddedToken]:
    """The tokens that it calls special, and those that its chat template writes."""
    if not getattr(tokenizer, "is_fast", False):
        return {}
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    template = str(tokenizer.chat_template)
    return {
        number: token
        for number, token in added.items()
        if token.special or token.content in template
    }


def _special_in(text: str, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, int, int]]:
    """Begin, end and id of the special tokens of a text, without the space that some take along."""
    special = special_of(tokenizer)
    if not special:
        return []
    is_changed = tokenizer.backend_tokenizer.normalizer is not None
    if not any(
        (is_changed and token.normalized) or token.content in text for token in special.values()
    ):
        return []
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spans = []
    for token, (start, end) in zip(whole["input_ids"], whole["offset_mapping"], strict=True):
        inner = text[start:end].strip()
        if inner and token in special and (is_changed or inner == special[token].content):
            start += text[start:end].index(inner)
            spans.append((start, start + len(inner), token))
    return spans


@lru_cache(maxsize=4)
def _splitter_of(
    tokenizer: PreTrainedTokenizerBase, size: int, template: str
) -> tuple[Tokenizer, dict[int, str]]:
    """A copy of a tokenizer of so many tokens that splits special ones as text, and the words that
    it takes for each of them instead, which nobody can guess.
    """
    special = special_of(tokenizer)
    about = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in about["added_tokens"]:
        token["special"] = token["id"] in special
    splitter = Tokenizer.from_str(json.dumps(about | {"truncation": None, "padding": None}))
    splitter.encode_special_tokens = True
    secret, placeholders = secrets.token_hex(16), {}
    for number, token in special.items():
        placeholders[number] = f"<{secret}.{number}>"
        spaces = {"lstrip": token.lstrip, "rstrip": token.rstrip}
        splitter.add_tokens([AddedToken(placeholders[number], normalized=False, **spaces)])
    return splitter, placeholders


def prefix_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that a tokenizer puts before a text; for most tokenizers none."""
    plain, whole = (
        tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True)
    )
    starts = (n for n in range(len(whole)) if whole[n : n + len(plain)] == plain)
    return whole[: next(starts, 0)]


def with_prefix(ids: Tensor, prefix: Sequence[int]) -> Tensor:
    """Tokens from the middle of a text, [..., T] int64, as the beginning of a text: the prefix
    replaces the first of them. So a row keeps its length, and its other tokens, which are the
    labels.
    """
    if not prefix:
        return ids
    ids = ids.clone()
    ids[..., : len(prefix)] = ids.new_tensor(prefix)[: ids.shape[-1]]
    return ids
