"""Position tables: take from an entry what its old position gave, add what the new one gives.

    k <- k_born - m[p_born] + m[p_now]

m[layer, head, p] is the mean key (value) that a layer and head give at position p over a corpus.
The moves telescope: whatever the evictions on the way, an entry is computed from its birth, so no
error adds up, and any number can be evicted at once. It is what StreamingLLM does with rotations,
carried over to learned positions.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvalign.aligners.base import Aligner, AlignerConfig, Move


class TableAligner(Aligner):
    """Tables [L, H, P, D] for keys and values, P = chunk_len; zero before training: no change."""

    kind = "table"
    recursive = False

    def __init__(self, config: AlignerConfig):
        super().__init__(config)
        shape = (config.num_layers, config.num_kv_heads, config.chunk_len, config.head_dim)
        self.key, self.value = (nn.Parameter(torch.zeros(shape)) for _ in range(2))

    def check(
        self, model: PreTrainedModel, cache_size: int, num_sinks: int, num_evicted: int
    ) -> None:
        super().check(model, cache_size, num_sinks, num_evicted)
        if num_sinks < self.config.num_sinks:
            raise ValueError(
                f"num_sinks must be at least {self.config.num_sinks} with this aligner (earlier "
                f"positions were not recorded), got {num_sinks}"
            )

    def anchor(
        self, layer: int, keys: Tensor, values: Tensor, born: Tensor
    ) -> tuple[Tensor, Tensor]:
        return keys - self.key[layer, :, born], values - self.value[layer, :, born]

    def realign(
        self, layer: int, keys: Tensor, values: Tensor, move: Move
    ) -> tuple[Tensor, Tensor]:
        now = slice(move.first, move.first + keys.shape[2])
        return keys + self.key[layer, :, now], values + self.value[layer, :, now]
