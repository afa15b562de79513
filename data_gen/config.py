"""Config of a recording, `config.json`: everything that its bytes depend on."""

import math
import platform
from importlib.metadata import version

import torch
from pydantic import BaseModel, ConfigDict

from kvalign.aligners.kinds import TARGETS
from kvalign.data_gen.settings import RecordSettings
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import ModelSpec, rotation_of
from kvalign.models.identity import embedding_fingerprint, identity
from kvalign.models.loading import LoadedModel

SPLITS = ("train", "val")
PAIRS = tuple(f"{kv}_{state}" for kv in TARGETS for state in ("stale", "aligned"))


class RecordedSettings(BaseModel):
    """Settings of a recording that its bytes depend on; see `RecordSettings`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    corpus: tuple[str, ...]
    num_tokens: int
    chunk_len: int
    num_sinks: int
    num_evicted: tuple[int, ...]  # ascending, each once
    stride: int
    val_share: float
    dtype: str
    shard_mb: float
    batch_size: int
    device: str
    seed: int


class RecordingConfig(BaseModel):
    """Config of a recording, `config.json`: the text, the model and the shapes.

    Attributes:
        identity: of the model (`kvalign.models.identity`); None in older recordings.
        embedding_fingerprint: of the model, for the config of an aligner.
        stale: description of the stale keys and values.
        shapes: of a chunk's tensors, by number evicted: L, H, S, D.
        chunks_per_shard: chunks in each shard but the last of a split.
        versions: of Python and packages.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    settings: RecordedSettings
    model: ModelSpec
    identity: str | None = None
    embedding_fingerprint: tuple[float, ...]
    stale: str
    shapes: dict[int, tuple[int, int, int, int]]
    chunks_per_shard: int
    versions: dict[str, str]

    def num_bytes(self, num_chunks: int) -> int:
        """Bytes of all pairs of so many chunks."""
        numbers = sum(self.num_rows(k, num_chunks) for k in self.settings.num_evicted)
        itemsize = getattr(torch, self.settings.dtype).itemsize
        return numbers * self.model.head_dim * len(PAIRS) * itemsize

    def num_rows(self, num_evicted: int, num_chunks: int) -> int:
        """Number of pairs of each kv in so many chunks: num_chunks * L * H * S."""
        return num_chunks * math.prod(self.shapes[num_evicted][:3])


def new_config(settings: RecordSettings, loaded: LoadedModel) -> RecordingConfig:
    """Config of a new recording; UserError if the model is too short for a chunk."""
    spec, limit = loaded.spec, loaded.spec.context_len
    if limit is not None and settings.chunk_len > limit:
        raise UserError(
            f"--chunk-len must be at most {limit} for {spec.name} (its context length), "
            f"got {settings.chunk_len}"
        )
    values = settings.as_dict() | {
        "stride": settings.stride or settings.chunk_len,
        "num_evicted": sorted(set(settings.num_evicted)),
    }
    recorded = RecordedSettings(**{name: values[name] for name in RecordedSettings.model_fields})
    num_slots = recorded.chunk_len - recorded.num_sinks
    shapes = {
        shift: (spec.num_layers, spec.num_kv_heads, num_slots - shift, spec.head_dim)
        for shift in recorded.num_evicted
    }
    itemsize = getattr(torch, settings.dtype).itemsize
    chunk_bytes = len(PAIRS) * math.prod(shapes[recorded.num_evicted[0]]) * itemsize
    versions = {name: version(name) for name in ("kvalign", "torch", "transformers")}
    rotated = "keys rerotated to the new positions, values as encoded"
    return RecordingConfig(
        settings=recorded,
        model=spec,
        identity=identity(loaded.model),
        embedding_fingerprint=embedding_fingerprint(loaded.model),
        stale=rotated if rotation_of(loaded.model) else "keys and values as encoded",
        shapes=shapes,
        chunks_per_shard=max(1, int(settings.shard_mb * 1e6 / chunk_bytes)),
        versions={"python": platform.python_version(), **versions},
    )
