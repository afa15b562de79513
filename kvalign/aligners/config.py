"""Config of an aligner, which its folder has beside the weights."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from kvalign.models.architectures import Family
from kvalign.models.identity import FINGERPRINT_LEN

CONFIG = "config.json"
Count = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Size = Annotated[Count, Field(ge=1)]
Text = Annotated[str, Field(strict=True)]


class AlignerConfig(BaseModel):
    """Base model of an aligner and its training: the `config.json` of its folder.

    Attributes:
        kind: name in `kvalign.aligners.kinds.KINDS`.
        base_model: the model's name at the time of training. Informative, since a folder may have
            moved.
        embedding_fingerprint: of the base model and of what was trained from it; why that, and not
            the model's identity: `kvalign.models.identity`.
        chunk_len: tokens of a recorded chunk; caches up to `chunk_len - 1` entries can be aligned.
        num_sinks: sinks in the recorded caches. For kinds that are trained on text: the number that
            did best, and a stream's default.
        shifts: numbers of entries evicted at once, as in training.
        last_position: the last that a table's entries are written at; None: that of chunk_len.
        sizes: sizes of the kind's own parts.
        training: data, settings and versions of each part; informative.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Text
    base_model: Text
    family: Family
    num_layers: Size
    num_kv_heads: Size
    head_dim: Size
    embedding_fingerprint: Annotated[
        tuple[FiniteFloat, ...],
        Field(min_length=FINGERPRINT_LEN, max_length=FINGERPRINT_LEN),
    ]
    chunk_len: Annotated[Size, Field(ge=2)]
    num_sinks: Count
    shifts: Annotated[tuple[Size, ...], Field(min_length=1)]
    last_position: Size | None = None
    sizes: dict[str, Size] = {}
    training: dict[str, dict[str, Any]] = {}

    @property
    def largest_cache(self) -> int:
        """The largest cache whose places are positions; `TableAligner.squeezed` says of others."""
        return min(self.chunk_len - 1, self.last_position or self.chunk_len)

    @property
    def num_positions(self) -> int:
        """Positions after the sinks of a recorded cache after one eviction: the most to align."""
        return self.chunk_len - self.num_sinks - 1
