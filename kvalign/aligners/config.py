"""Config of an aligner, which its folder has beside the weights, and the model card, which is
written from it alone. `training` may hold one dict for each part (`key` and `value`); the card's
template prints the fields that it knows.
"""

import math
import re
from pathlib import Path
from typing import Annotated, Any

from huggingface_hub import ModelCardData
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from kvalign import checkpoints
from kvalign.models import fetched
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


def card_text(config: AlignerConfig) -> str:
    """The whole card, with the metadata for the hub."""
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("kvalign.aligners"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["exp"] = math.exp
    parts = config.training
    data = [part["data"] for part in parts.values() if "data" in part]
    imported = any("licence" in entry for entry in data)
    datasets = {name for entry in data for name in entry.get("datasets", ()) if _is_hub_id(name)}
    metadata = ModelCardData(
        license="other" if imported else "apache-2.0",
        library_name="kvalign",
        tags=["kv-cache", "kvalign"],
        base_model=config.base_model if _is_hub_id(config.base_model) else None,
        datasets=sorted(datasets) or None,
    )
    judged = next((part["judged"] for part in parts.values() if "judged" in part), None)
    return templates.get_template("card.md.jinja").render(
        metadata=metadata.to_yaml(),
        config=config,
        parts=parts,
        judged=judged,
        set_name=_set_name,
        imported=imported,
        listed=_listing,
        number=lambda x: "" if x is None else f"{x:.4g}",
    )


def _set_name(parts: list[str]) -> str:
    """Set of parts in words: `keys and values`."""
    return " and ".join(f"{part}s" for part in parts) or "nothing (`streaming-llm`)"


def _listing(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value not in ([], {}))


def _is_hub_id(name: str) -> bool:
    known_here = name in (*checkpoints.MODELS, *fetched.MODELS) or Path(name).exists()
    return not known_here and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None
