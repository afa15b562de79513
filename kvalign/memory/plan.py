"""Plan of a memory: which layers take entries back, with which bias of their scores, and where
these lie, as it was measured on a model (`kvalign tune-memory`).

Models differ: recall-llama finds more facts if entries lie by rank, and the texts of others are
better by age on the same positions (eval/results/memory.md). A plan is looked for in

1. the folder of the aligner that is used,
2. the user's cache folder, by the model's name,
3. the plans that ship.

It fits models with the embedding that it was measured with, in any precision, as an aligner does.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from transformers import PreTrainedModel

from kvalign import checkpoints
from kvalign.aligners import Aligner
from kvalign.cache.memory_sizes import ALL, usual_places
from kvalign.cache.sizes import CacheSizes, RecallBy
from kvalign.foundation.files import read_checked
from kvalign.foundation.progress import warn_once
from kvalign.models.architectures import spec_of
from kvalign.models.fetched import cache_dir
from kvalign.models.identity import FINGERPRINT_LEN, has_fingerprint

FILE = "recall.json"
"""Name of a plan in an aligner's folder."""
PLANS = "recall-plans"
"""Folder of plans, in the user's cache folder and among what ships."""


class RecallPlan(BaseModel):
    """Plan of a model's memory.

    Attributes:
        format: of the file.
        base_model: the model's name when it was measured. Informative.
        embedding_fingerprint: of that model.
        recall_places, recall_layers: see `CacheSizes`.
        helps: whether a stream with a memory, used as is usual for its family, surely loses less
            than one without, with caches of each size.
        measured: with which command, and what it found. Informative.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    base_model: str
    embedding_fingerprint: Annotated[
        tuple[FiniteFloat, ...], Field(min_length=FINGERPRINT_LEN, max_length=FINGERPRINT_LEN)
    ]
    recall_places: RecallBy
    recall_layers: str = ALL
    helps: bool = False
    measured: dict[str, Any] = {}

    @property
    def sizes(self) -> dict[str, Any]:
        """Return what it says, as fields of `CacheSizes`."""
        return self.model_dump(include={"recall_places", "recall_layers"})


def find_plan(model: PreTrainedModel, aligner: Aligner | None) -> RecallPlan | None:
    """Return the plan of a model with an aligner; None if there is none."""
    for path in _files(model, aligner):
        if path.is_file():
            plan = read_checked(RecallPlan, path)
            if has_fingerprint(model, plan.embedding_fingerprint):
                return plan
    return None


def _files(model: PreTrainedModel, aligner: Aligner | None) -> Iterator[Path]:
    if aligner is not None and (folder := folder_of(aligner)):
        yield folder / FILE
    if name := spec_of(model.config).name:
        yield in_cache(name)
        yield checkpoints.FOLDER / PLANS / in_cache(name).name


def in_cache(model: str) -> Path:
    """File of the plan of a model in the user's cache folder."""
    return cache_dir() / PLANS / f"{Path(model).resolve().name.removesuffix('.gguf').lower()}.json"


def folder_of(aligner: Aligner) -> Path | None:
    """Folder of an aligner of the user's; None for one that ships, is on the hub, or in memory."""
    source = aligner.source
    if source is None or checkpoints.aligner_path(source) or not Path(source).is_dir():
        return None
    return Path(source)


def as_planned(
    model: PreTrainedModel,
    aligner: Aligner | None,
    sizes: CacheSizes,
    asked: Mapping[str, Any],
    warn: bool = True,
) -> CacheSizes:
    """Return the sizes of a cache with a memory as a model's plan says, where nothing is `asked`.
    If nothing was measured on the model, a line says so, once (`warn`).
    """
    spec, plan = spec_of(model.config), find_plan(model, aligner)
    planned: dict[str, Any] = {"recall_places": usual_places(spec.family)}
    if plan is not None:
        planned = plan.sizes
    elif warn and asked.get("recall_places") is None:
        warn_once(
            f"what a memory gives back was not measured on {spec.name or 'this model'}: all layers "
            f"take entries back, by {planned['recall_places']} (kvalign tune-memory measures it)"
        )
    planned["num_recalled"] = None  # as is usual for these places
    return replace(sizes, **{x: value for x, value in planned.items() if asked.get(x) is None})
