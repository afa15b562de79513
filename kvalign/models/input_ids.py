"""Token ids of a stream's inputs, and the tokenizers that can stream."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvalign.foundation.errors import UserError
from kvalign.models.text_ids import ids_of


def encoded(
    text: str | Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    *,
    goes_on: bool = False,
) -> list[int]:
    """The token ids of an input, which may already be token ids.

    Args:
        goes_on: a text continues another one (`kvalign.models.text_ids`), else it begins a stream.
    """
    if isinstance(text, str):
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
    return ids


def check_ids(ids: Tensor, vocab_size: int | None = None) -> None:
    """Raise UserError unless ids are [B, T] int64 or int32, not empty, and below V if that is
    given. Single tokens on a GPU are not checked, since that would wait for the device.
    """
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        kind = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise UserError(f"ids must be a tensor [rows, tokens] of int64, got {kind}")
    if ids.numel() == 0:
        raise UserError(f"the prompt is empty: give at least one token, got ids {list(ids.shape)}")
    if vocab_size is not None and (ids.shape[1] > 1 or ids.device.type == "cpu"):
        low, high = map(int, torch.aminmax(ids))
        if not 0 <= low <= high < vocab_size:
            raise UserError(
                f"token ids must be below {vocab_size} for this model, got {low} to {high}"
            )


def rows_of(rows: Sequence[int] | Tensor, num_rows: int) -> list[int]:
    """The rows of the batch with these numbers."""
    named = rows.tolist() if isinstance(rows, Tensor) else rows
    if not all(type(row) is int and -num_rows <= row < num_rows for row in named):
        raise UserError(f"rows must be whole numbers below {num_rows}, got {rows!r:.80}")
    return list(named)


def check_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError for a tokenizer that cannot decode token by token."""
    if not getattr(tokenizer, "is_fast", False):
        kind = type(tokenizer).__name__
        raise UserError(f"a stream of text needs a fast tokenizer, got a {kind}")
