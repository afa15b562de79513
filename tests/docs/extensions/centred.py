"""The `centred` kind: position tables without scales, k <- m[p_now] + (k_birth - m[p_birth])."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvalign.aligners import Aligner, AlignerConfig, Move
from kvalign.aligners.entries import KV
from kvalign.aligners.kinds import TARGETS
from kvalign.data_gen.recording import positionless
from kvalign.foundation.settings import keywords_of
from kvalign.models.loading import LoadedModel
from kvalign.training.settings import TextSettings
from kvalign.training.text import Texts
from kvalign.training.text_run import train_on_text


@dataclass(frozen=True, kw_only=True)
class CentredSettings(TextSettings):
    """Train means of keys and values at each position.

    Example:
        kvalign train centred --num-tokens 20000 --chunk-len 64 --out my-aligner
    """

    aligner_kind = "centred"


class CentredAligner(Aligner):
    """Means [L, H, P, D] for keys and values; before training 0: no change."""

    kind = "centred"
    recursive = False

    def __init__(self, config: AlignerConfig):
        super().__init__(config)
        shape = (config.num_layers, config.num_kv_heads, config.chunk_len, config.head_dim)
        self.key, self.value = (nn.Parameter(torch.zeros(shape)) for _ in TARGETS)

    def anchor(
        self, layer: int, entries: KV, birth: Tensor | slice, evicting: bool | Tensor = False
    ) -> KV:
        means = self.key[layer, :, birth], self.value[layer, :, birth]
        return KV(entries.keys - means[0], entries.values - means[1])

    def realign(self, layer: int, entries: KV, move: Move) -> KV:
        means = self.key[layer, :, move.now], self.value[layer, :, move.now]
        return KV(entries.keys + means[0], entries.values + means[1])


def fit(
    aligner: CentredAligner, settings: CentredSettings, loaded: LoadedModel, text: Texts
) -> dict[str, Any]:
    """Set the means to those of the training text."""
    entries = positionless(loaded.model, text.chunks("train", settings.chunk_len))
    for kv, vectors in zip(TARGETS, entries, strict=True):
        if kv in settings.kvs:
            getattr(aligner, kv).copy_(vectors.mean(0))
    return {}


@keywords_of(CentredSettings)
def train(settings: CentredSettings, *, loaded: LoadedModel | None = None) -> dict[str, Any]:
    return train_on_text(fit, settings, loaded)
