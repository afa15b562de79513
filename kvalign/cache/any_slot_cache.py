"""Streaming cache from which any entry may be evicted. Each head may evict a different entry.

     places  0 1 2 3 | 4 5 6 ... C-1        sinks stay in front, entries in the order of time
     head 0  0 1 2 3 | 7 9 30 ... 99
     head 1  0 1 2 3 | 4 5 31 ... 99        which tokens they are of, differs

A policy scores the entries that a step sees. Before the next step those with the lowest scores are
evicted. The rest are placed by rank: the r-th kept entry gets position r. This needs only entries
that can be placed from their original form (rotations, tables). With `positions="keep"` nothing is
placed, and positions grow with the stream.
"""

from typing import final

import torch
from torch import Tensor
from transformers import PretrainedConfig

from kvalign.cache.any_slot_layer import AnySlotLayer
from kvalign.cache.base import FixedSizeCache
from kvalign.cache.realigner import Realigner
from kvalign.cache.sizes import CacheSizes
from kvalign.cache.step import Step
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import REGISTERED, ModelSpec, window_of
from kvalign.models.attention import install
from kvalign.policies import POLICIES


@final
class AnySlotCache(FixedSizeCache):
    """Entries that a policy keeps, placed by rank or left at their original positions.

    Args:
        spec, sizes: see `FixedSizeCache`.
        realigner: keeps the kept entries right; it must place them from their original form.
        config: of the model, whose attention passes on its weights if the policy reads them.

    Raises:
        UserError: as of `FixedSizeCache`; a realigner, a model or positions that do not fit.
    """

    attention: list[AnySlotLayer]

    def __init__(
        self,
        spec: ModelSpec,
        sizes: CacheSizes,
        realigner: Realigner | None,
        config: PretrainedConfig,
    ):
        self.config, self.policy = config, POLICIES[sizes.policy](sizes.cache_size)
        self.keeps_positions = sizes.positions == "keep"
        self.last_token = self._last_token(spec, realigner) if self.keeps_positions else None
        if self.policy.reads_weights:
            self._check_attention(spec)
        if realigner is not None:
            realigner = None if self.keeps_positions else realigner.from_birth()
        super().__init__(spec, sizes, realigner, config=config)

    def _make_layers(self, spec: ModelSpec) -> list[AnySlotLayer]:
        return [AnySlotLayer(self, i, self.policy, self.sizes) for i in spec.attention]

    def _last_token(self, spec: ModelSpec, realigner: Realigner | None) -> int | None:
        """Tokens after which there is no position left."""
        if spec.family == "alibi":
            raise UserError(
                f"positions=keep is not for {spec.name or 'this model'}: ALiBi computes its bias "
                "from places"
            )
        rotation = realigner.rotation if realigner else None
        is_bounded = rotation is None or rotation.is_bounded
        return spec.context_len if is_bounded else None

    def _check_attention(self, spec: ModelSpec) -> None:
        name, policy = spec.name or "this model", self.policy.name
        if spec.model_type not in REGISTERED:
            raise UserError(
                f"policy {policy} reads attention weights, which {spec.model_type} models do "
                "not expose: use key-norm, keydiff or random"
            )
        if window_of(self.config) is not None:
            raise UserError(
                f"policy {policy} reads attention over all entries, but layers of {name} see "
                "only a window"
            )

    def index(self, row: int = 0) -> Tensor:
        """Return the positions in the stream of a row's entries, by layer and head: [L, H, S]."""
        if not self.seen:
            return torch.empty(len(self.attention), 0, 0, dtype=torch.int64)
        self.settle()
        num = self.sizes.num_stored(self.seen[row])
        index = [layer.index[row].cpu() for layer in self.attention]
        return torch.stack([x[:, x.shape[1] - num :] for x in index])

    def positions(self) -> list[int]:
        return list(self.seen) if self.keeps_positions else super().positions()

    def check_input(self, num_rows: int, num_new: int) -> None:
        super().check_input(num_rows, num_new)
        last, seen = self.last_token, max(self.seen, default=0)
        if last is not None and seen + num_new > last:
            raise UserError(
                f"positions=keep ends with the {last} positions of this model, got {num_new} more "
                f"tokens after {seen}: positions=compact has no end"
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if self.step is None:
            self.check_input(
                len(self.seen), 1
            )  # before a model looks up a position that it does not have
        return super().get_seq_length(layer_idx)

    def _prepare_entries(self, step: Step) -> Step:
        if self.is_filled:
            for layer in self.attention:
                layer.evict(step)
        if self.policy.reads_weights:
            install(self.config)
        return step
