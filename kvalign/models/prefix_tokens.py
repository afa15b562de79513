"""Prefix tokens: what a tokenizer puts before a text, a beginning-of-text or sink token, as entry 0
of its stream.

A sink token (Xiao et al. 2024, section 3.3) is one that a model had before every row of its
training, so that attention which is not needed elsewhere can go there. It is the tokenizer's
matter: what encodes a text by it has the token, and nothing else must know.
"""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase


def prefix_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that a tokenizer puts before a text; most put none."""
    plain, whole = (
        tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True)
    )
    starts = (n for n in range(len(whole)) if whole[n : n + len(plain)] == plain)
    return whole[: next(starts, 0)]


def with_prefix(ids: Tensor, prefix: Sequence[int]) -> Tensor:
    """Tokens from the middle of a text, [..., T] int64, as the beginning of one: the prefix takes
    the place of the first of them. So a row is as long as without one, and its other tokens, which
    are the labels, are the same.
    """
    if not prefix:
        return ids
    ids = ids.clone()
    ids[..., : len(prefix)] = ids.new_tensor(prefix)[: ids.shape[-1]]
    return ids
