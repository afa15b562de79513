"""Text for the training of an aligner, and the part held out for judging."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvalign.data_gen.corpora import some_ids
from kvalign.data_gen.facts import ages
from kvalign.foundation.errors import UserError
from kvalign.models.input_ids import prefix_ids, with_prefix

VAL_SHARE = 0.1


def val_sizes(largest: int) -> list[int]:
    """Cache sizes for validation: 32, 64, ... and the largest."""
    return [*takewhile(lambda size: size < largest, (32 << n for n in count())), largest]


@dataclass(frozen=True)
class Texts:
    """Token ids [N] int64 of each corpus; the last tenth of each is for validation.

    Attributes:
        opening: the tokenizer's opening tokens. Rows begin with them, in place of their first
            tokens.
        is_recall: facts and questions, of which only answers count: the other tokens are random,
            and models of that corpus have not learned them.
    """

    train: list[Tensor]
    val: list[Tensor]
    opening: Sequence[int] = ()
    is_recall: bool = False

    def chunks(self, split: str, chunk_len: int) -> Tensor:
        """All chunks of a split, without overlap: [num_chunks, chunk_len]."""
        chunks = [ids.unfold(0, chunk_len, chunk_len) for ids in getattr(self, split)]
        return with_prefix(torch.cat(chunks), self.opening)

    def rows(self, rng: torch.Generator, num_rows: int, row_len: int) -> Tensor:
        """Rows [num_rows, row_len] from random places of the training part; corpora alternate."""
        rows = []
        for which in torch.randint(len(self.train), (num_rows,), generator=rng).tolist():
            ids = self.train[which]
            start = int(torch.randint(len(ids) - row_len + 1, (), generator=rng))
            rows.append(ids[start : start + row_len])
        return with_prefix(torch.stack(rows), self.opening)

    def val_rows(self, num_rows: int, row_len: int) -> Iterator[Tensor]:
        """Rows [num_rows, row_len] from the whole validation part, of one text at a time."""
        for ids in self.val:
            starts = torch.linspace(0, len(ids) - row_len, num_rows, dtype=torch.float32).long()
            rows = torch.stack([ids[start : start + row_len] for start in starts.tolist()])
            yield with_prefix(rows, self.opening)

    def counted(self, ids: Tensor, cache_size: int) -> Tensor | None:
        """Mask of the labels of rows [B, N] that count, of those after the first cache_size + 1
        tokens of a row: [B * labels] bool, row by row; None: all. Of the corpus `recall` answers
        count whose fact is in the cache; UserError if there is none.
        """
        if not self.is_recall:
            return None
        ages = row_ages(ids)[:, cache_size + 1 :].flatten()
        in_cache = (ages > 0) & (ages <= cache_size)
        if not in_cache.any():
            raise UserError(
                f"this text has no question about facts in a cache of {cache_size}: use more text "
                "(--num-tokens)"
            )
        return in_cache


def read(
    corpora: Sequence[str], tokenizer: PreTrainedTokenizerBase, num_tokens: int, row_len: int
) -> Texts:
    """The first tokens of the train part of each corpus, `num_tokens` in all, in equal shares.

    Raises:
        UserError: a share too short for a row of `row_len` tokens in each split.
    """
    train, val = [], []
    for corpus in corpora:
        ids = torch.tensor(some_ids(corpus, tokenizer, num_tokens // len(corpora)))
        num_val = int(len(ids) * VAL_SHARE)
        if num_val <= row_len:  # a row, and the label of its last token
            needed = math.ceil((row_len + 1) / VAL_SHARE)
            raise UserError(
                f"corpus {corpus!r} gives {len(ids)} tokens, {needed} are needed for --chunk-len "
                f"{row_len} (a share of {VAL_SHARE} is for validation): name a longer text, a "
                "larger --num-tokens or a smaller --chunk-len"
            )
        train.append(ids[: len(ids) - num_val])
        val.append(ids[len(ids) - num_val :])
    return Texts(train, val, prefix_ids(tokenizer), is_recall=[*corpora] == ["recall"])


def row_ages(ids: Tensor) -> Tensor:
    """`ages` of each row of ids [B, T]."""
    return torch.tensor([ages(row) for row in ids.tolist()])
