"""Text that aligners are trained on with the language model itself: rows from random places."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvalign.data_gen.chunks import equal_shares
from kvalign.data_gen.corpora import token_pieces
from kvalign.errors import UserError

VAL_SHARE = 0.1


@dataclass(frozen=True)
class Text:
    """Token ids [N] int64 of each corpus; the last tenth of each is for validation."""

    train: list[Tensor]
    val: list[Tensor]

    def chunks(self, split: str, chunk_len: int) -> Tensor:
        """All chunks of a split, without overlap: [num_chunks, chunk_len]."""
        return torch.cat([ids.unfold(0, chunk_len, chunk_len) for ids in getattr(self, split)])

    def rows(self, rng: torch.Generator, num_rows: int, row_len: int) -> Tensor:
        """Rows [num_rows, row_len] from random places of the training part; corpora take turns."""
        rows = []
        for which in torch.randint(len(self.train), (num_rows,), generator=rng).tolist():
            ids = self.train[which]
            start = int(torch.randint(len(ids) - row_len + 1, (), generator=rng))
            rows.append(ids[start : start + row_len])
        return torch.stack(rows)


def read(
    corpora: Sequence[str], tokenizer: PreTrainedTokenizerBase, num_tokens: int, row_len: int
) -> Text:
    """The first tokens of the train part of each corpus, `num_tokens` in all, in equal shares.

    Raises:
        UserError: a share too short to give a row of `row_len` tokens to each split.
    """
    train, val = [], []
    for corpus in corpora:
        pieces = equal_shares([token_pieces(corpus, tokenizer)], num_tokens // len(corpora))
        ids = torch.tensor([token for piece in pieces for token in piece])
        num_val = int(len(ids) * VAL_SHARE)
        if num_val < row_len:
            raise UserError(
                f"corpus {corpus!r} gives {num_val} tokens for validation, {row_len} are needed: "
                "raise --num-tokens or lower --chunk-len"
            )
        train.append(ids[: len(ids) - num_val])
        val.append(ids[len(ids) - num_val :])
    return Text(train, val)
