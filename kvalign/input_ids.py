"""The token ids of what a stream is given, and the tokenizers that it takes."""

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvalign.errors import UserError
from kvalign.escape import check_text


def encoded(
    text: str | Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    *,
    special: bool = True,
) -> list[int]:
    """The token ids of an input, which may be them already.

    Args:
        special: whether the tokenizer adds its special tokens to a text.

    Raises:
        UserError: it is neither, or has ids that the model does not know.
    """
    if isinstance(text, str):
        ids = ids_of(text, tokenizer, special)
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
            f"token ids must be below {size} for this model, got {min(ids)} to {max(ids)}: is the "
            "tokenizer its own?"
        )
    return ids


def ids_of(text: str, tokenizer: PreTrainedTokenizerBase, special: bool) -> list[int]:
    """The token ids of a text; UserError as of `check_text`."""
    check_text(text)
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]


def check_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError for a tokenizer that cannot decode token by token."""
    if not getattr(tokenizer, "is_fast", False):
        kind = type(tokenizer).__name__
        raise UserError(f"a stream of text needs a fast tokenizer, got a {kind}")
