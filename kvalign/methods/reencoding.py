"""Methods that keep tokens and re-encode them."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvalign.cache.form import expect_tensor
from kvalign.cache.sizes import CacheSizes
from kvalign.foundation.errors import UserError
from kvalign.methods.base import Method
from kvalign.models.input_ids import check_ids, rows_of


class Reencoding(Method):
    """Method that re-encodes the kept tokens, so that no entry is ever stale."""

    rows: list[Tensor]
    """[S] int64 of each row: what the last step saw."""

    def __init__(self, model: PreTrainedModel, sizes: CacheSizes):
        super().__init__(model, sizes)
        self.reset()

    def reset(self) -> None:
        self.rows = []

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows_of(rows, len(self.rows))]

    def join(self, others: Sequence[Self]) -> None:
        self.check_alike(others)
        self.rows = [row for method in (self, *others) for row in method.rows]

    def state(self) -> dict[str, Tensor]:
        if not self.rows:
            return {}
        return {"seen": torch.cat(self.rows), "lens": torch.tensor([len(x) for x in self.rows])}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.reset()
        self.rows = self._rows_of(state)

    def _rows_of(self, state: dict[str, Tensor]) -> list[Tensor]:
        if not state:
            return []
        num_rows, num_seen = (state[x].numel() if x in state else 0 for x in ("lens", "seen"))
        lens = expect_tensor(state, "lens", (num_rows,), torch.int64).tolist()
        seen = expect_tensor(state, "seen", (num_seen,), torch.int64)
        longest, vocab_size = self.sizes.first_input_len, self.model.config.vocab_size
        if not (
            lens
            and sum(lens) == num_seen
            and 1 <= min(lens) <= max(lens) <= longest
            and 0 <= seen.min() <= seen.max() < vocab_size
        ):
            raise UserError(
                f"a stream's seen must be rows of ids below {vocab_size}, each of 1 to {longest}"
            )
        return list(seen.to(self.model.device).split(lens))

    def extend(self, ids: Tensor) -> list[Tensor]:
        """Return the tokens that each row would see with ids [B, T] more, without evictions."""
        check_ids(ids, self.model.config.vocab_size)
        if not self.rows:
            return list(ids)
        if len(ids) != len(self.rows):
            raise UserError(f"this stream has {len(self.rows)} rows, got ids of {len(ids)}")
        return [torch.cat(pair) for pair in zip(self.rows, ids, strict=True)]

    def keep(self, ids: Tensor) -> Tensor:
        """The part of ids [T] that a step sees: all, or the sinks and the rest after evictions."""
        dropped, num_sinks = self.sizes.num_dropped(len(ids) - 1), self.sizes.num_sinks
        return torch.cat([ids[:num_sinks], ids[num_sinks + dropped :]]) if dropped else ids

    @property
    def fill(self) -> int:
        return max((self.sizes.num_stored(len(row)) for row in self.rows), default=0)
