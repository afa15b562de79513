"""Prefix tokens: those that a tokenizer puts before a text, a beginning-of-text or sink token, as
entry 0 of its stream.

A sink token (Xiao et al. 2024, section 3.3) stood before every row of a model's training, so that
attention without another target can go there. Only the tokenizer handles it: every text that it
encodes has the token.
"""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase


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
