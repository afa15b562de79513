"""What a tokenizer puts before a text: a beginning-of-text or sink token, as entry 0 of its stream.

A sink token (Xiao et al. 2024, section 3.3) is one that a model had before every row of its
training, so that attention which is not needed elsewhere can go there. It is the tokenizer's
matter: what encodes a text by it has the token, and nothing else must know.
"""

from torch import Tensor
from transformers import PreTrainedTokenizerBase


def opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that a tokenizer puts before a text; none with most."""
    plain, whole = (
        tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True)
    )
    starts = (n for n in range(len(whole)) if whole[n : n + len(plain)] == plain)
    return whole[: next(starts, 0)]


def begun(ids: Tensor, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Rows of tokens from anywhere, [..., T] int64, as beginnings of a text: the opening takes the
    place of their first tokens, so that a row is as long as without one and those after it are the
    same.
    """
    opening = opening_ids(tokenizer)
    if not opening:
        return ids
    ids = ids.clone()
    ids[..., : len(opening)] = ids.new_tensor(opening)[: ids.shape[-1]]
    return ids
