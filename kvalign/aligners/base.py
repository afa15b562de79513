"""Base of every aligner: trained parts for one base model, stored in a folder as safetensors, a
config, and a model card, which is written from the config alone.

An aligner corrects the entries that stay in the cache after an eviction. It does not rotate the
keys of a rotary model (`kvalign.cache.realigner` does), so an aligner that adds nothing gives
StreamingLLM.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import torch
from huggingface_hub import ModelCard, PyTorchModelHubMixin, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, model_validator
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvalign import checkpoints
from kvalign.aligners.entries import KV
from kvalign.aligners.kinds import label_of
from kvalign.foundation import hub
from kvalign.foundation.errors import NotFoundError, UserError
from kvalign.foundation.files import read_checked, sha256, write_json, write_together
from kvalign.foundation.names import REMOVED, nearest, unknown
from kvalign.foundation.settings import typed
from kvalign.models.architectures import Family, ModelSpec, spec_of
from kvalign.models.identity import FINGERPRINT_LEN, embedding_fingerprint, has_fingerprint
from kvalign.models.weights import read_weights
from kvalign.models.wrapped import no_autograd_modes

if TYPE_CHECKING:
    from kvalign.cache.sizes import CacheSizes

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
REVISION_LEN = 12
OF_MODEL = ("family", "num_layers", "num_kv_heads", "head_dim")

Birth = Tensor | slice
"""Original positions of entries: [S] int64, or a slice of length S."""
Flags = Tensor | bool  # of each entry, [B, S]; one for all that are alike

Count = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Size = Annotated[Count, Field(ge=1)]
Text = Annotated[str, Field(strict=True)]


class Verdict(BaseModel):
    """Measured: the perplexity of held-out text with an aligner relative to that of `discard-half`,
    with equal sinks, at a cache size; and its 95 % interval, None with too few labels for one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cache_size: Size
    ratio: FiniteFloat
    low: FiniteFloat | None = None
    high: FiniteFloat | None = None

    @property
    def is_worse(self) -> bool:
        return self.ratio > 1

    @property
    def is_better(self) -> bool:
        """Return whether the interval lies below 1, or without one the ratio."""
        return (self.ratio if self.high is None else self.high) < 1

    @property
    def in_figures(self) -> str:
        ends = "" if self.low is None else f" ({self.low:.3f} to {self.high:.3f})"
        return f"{self.ratio:.3f}{ends}"

    def __str__(self) -> str:
        return f"{self.in_figures} at C = {self.cache_size}"


class AlignerConfig(BaseModel):
    """Base model of an aligner and its training: the `config.json` of its folder.

    Attributes:
        format: of the file.
        kind: name in `kvalign.aligners.kinds.KINDS`.
        base_model: the model's name at the time of training. Informative, since a folder may have
            moved.
        embedding_fingerprint: of the base model and of what was trained from it; why that, and not
            the model's identity: `kvalign.models.identity`.
        chunk_len: tokens of a recorded chunk; caches up to `chunk_len - 1` entries can be aligned.
        num_sinks: sinks in the recorded caches. For kinds that are trained on text: the number that
            did best, and a stream's default.
        shifts: numbers of entries evicted at once, as in training.
        positions: of some cache sizes, the position at which a table on learned positions has a
            token computed once something was evicted, as measured (`position_at`).
        sizes: sizes of the kind's own parts.
        training: data, settings and versions, in one dict for each part (`key` and `value`);
            informative. The card prints the fields that it knows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
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
    positions: tuple[tuple[Size, Size], ...] = ()
    sizes: dict[str, Size] = {}
    training: dict[str, dict[str, Any]] = {}

    @model_validator(mode="after")
    def _check_verdicts(self) -> Self:
        assert self.verdicts is not None
        return self

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Findings of `kvalign.training.judge`, by ascending cache size; empty without any."""
        for part in self.training.values():
            if isinstance(judged := part.get("judged"), dict):
                return _VERDICTS.validate_python(judged.get("against_discard_half", ()))
        return ()

    @property
    def num_judged(self) -> int | None:
        """Labels of the verdicts; None if that was not recorded."""
        judged = (part.get("judged") for part in self.training.values())
        return next((x.get("num_labels") for x in judged if isinstance(x, dict)), None)

    def verdict_at(self, cache_size: int) -> Verdict | None:
        """The verdict for caches of this size; None without any. Between two judged sizes nothing
        was measured: it is the worse of theirs. Beyond the last it is that one's. If the aligner is
        better at no size, it is the worst of all: a ratio below 1 among them is chance.
        """
        near = self.verdicts
        if any(one.is_better for one in near):
            below = [one for one in near if one.cache_size <= cache_size][-1:]
            near = (*below, *[one for one in near if one.cache_size >= cache_size][:1])
        return max(near, key=lambda one: one.ratio, default=None)

    def position_at(self, cache_size: int) -> int:
        """Position of a new token in a full cache of this size: that of the nearest size that was
        measured, if both lie above their size or both below it; else the size.
        """
        own = cache_size, cache_size
        size, at = min(self.positions, key=lambda one: abs(one[0] - cache_size), default=own)
        is_moved = (at > size and at > cache_size) or (at < size and at < cache_size)
        return at if is_moved else cache_size

    def sizes_of_discard_half(self) -> list[int]:
        """The judged sizes at which `auto` takes `discard-half`."""
        sizes = [one.cache_size for one in self.verdicts]
        return [size for size in sizes if (one := self.verdict_at(size)) and one.is_worse]

    @property
    def largest_cache(self) -> int:
        return self.chunk_len - 1

    @property
    def num_positions(self) -> int:
        """Positions after the sinks of a recorded cache after one eviction: the most to align."""
        return self.chunk_len - self.num_sinks - 1


_VERDICTS = TypeAdapter(tuple[Verdict, ...])


@dataclass(frozen=True)
class Move:
    """A move of the entries after the sinks.

    Attributes:
        shift: the number of positions that each entry moves towards the start since the last move.
        first: the position of the first entry after the sinks: their number, unless positions run
            on.
        now: [S] int64, the positions after the move: first, first + 1, ...; for a table alone, [B,
            H, S] of any positions.
    """

    shift: int
    first: int
    now: Tensor


class Aligner(
    nn.Module, PyTorchModelHubMixin, ABC, library_name="kvalign", tags=["kv-cache", "kvalign"]
):
    """Base of the aligner kinds; `from_pretrained` returns the kind that the config names."""

    kind: ClassVar[str]
    recursive: ClassVar[bool]
    """True: the input of `realign` is its own last output; False: the output of `anchor`."""
    default_sizes: ClassVar[Mapping[str, int]] = {}
    """Sizes of the kind's own parts, by their names in `AlignerConfig.sizes`."""
    default_num_sinks: ClassVar[int] = 0

    source: str | None = None
    """Name under which it was loaded: shipped, folder or hub id; None: it was made here."""
    revision: str | None = None
    """The hub's commit, or the first digits of the SHA-256 of a folder's weights."""

    def __init__(self, config: AlignerConfig):
        super().__init__()
        self.config = config

    @property
    def label(self) -> str:
        """Name of the aligner in tables of results, as of `label_of`."""
        return label_of(self.config.kind, self.config.training)

    def anchor(self, layer: int, entries: KV, birth: Birth, evicting: Flags = False) -> KV:
        """Return the form in which a layer stores its new entries. `realign` starts from it unless
        the aligner is recursive.

        Args:
            layer: its index.
            entries: [B, H, S, D] each; keys are rotated back to position 0 where the model is
                rotary.
            birth: their original positions.
            evicting: whether something had been evicted when they were written.

        Returns:
            entries of the same shape.
        """
        return entries

    @abstractmethod
    def realign(self, layer: int, entries: KV, move: Move) -> KV:
        """Return a layer's entries after the sinks, corrected for their present positions.

        Args:
            layer: its index.
            entries: [B, H, S, D] each. Keys of a rotary model: rotated to their new positions if
                the aligner is recursive, else at position 0 and rotated afterwards.
            move: the eviction, and the present position of each entry.

        Returns:
            entries of the same shape.
        """

    def check(self, model: PreTrainedModel, sizes: "CacheSizes") -> None:
        """Raise UserError, which names the field, unless the aligner fits this model and cache."""
        spec = spec_of(model.config)
        named = f"the aligner {self.source}" if self.source else "this aligner"
        made_for = f"{named} was made for {self.config.base_model}"
        for name in OF_MODEL:
            expected, actual = getattr(self.config, name), getattr(spec, name)
            if expected != actual:
                raise UserError(f"{made_for}: {name} must be {expected}, this model has {actual}")
        if not has_fingerprint(model, self.config.embedding_fingerprint):
            raise UserError(
                f"{made_for}: the embedding weights of this model differ; train an aligner for "
                "it with kvalign train"
            )
        if sizes.cache_size >= self.config.chunk_len:
            raise UserError(
                f"cache_size must be at most {self.config.chunk_len - 1} with {named} (its "
                f"chunk_len is {self.config.chunk_len}), got {sizes.cache_size}"
            )
        if sizes.last_position >= self.config.chunk_len:
            raise UserError(
                f"realign_every must be at most {self.config.chunk_len - sizes.cache_size} with "
                f"{named} and cache_size {sizes.cache_size} (its chunk_len is "
                f"{self.config.chunk_len}, and positions run on), got {sizes.realign_every}"
            )

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """The README.md that `save_pretrained` writes unless one exists."""
        from kvalign.aligners.card import card_text

        return ModelCard(card_text(self.config))

    def save_pretrained(
        self, save_directory: str | Path, *, push_to_hub: bool = False, **options: Any
    ) -> str | None:
        """Write weights, config and a card to a folder, all or none; a card that is there stays.

        Args:
            options: of `push_to_hub`, whose `repo_id` is the folder's name unless given.
        """
        to = Path(save_directory)
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.state_dict().items()}

        def write(folder: Path) -> None:
            save_file(tensors, folder / WEIGHTS)
            write_json(folder / CONFIG, self.config.model_dump(mode="json"))
            if not (to / CARD).exists():
                self.generate_model_card().save(folder / CARD)

        write_together(to, write, last=CONFIG)
        return self.push_to_hub(**{"repo_id": to.name, **options}) if push_to_hub else None

    # Fewer options than the mixin's: an aligner's kind and sizes come from its config.
    @classmethod
    @no_autograd_modes()
    def from_pretrained(cls, model_id: str | Path, *, revision: str | None = None) -> "Aligner":  # type: ignore[override]
        """Load an aligner of any kind by shipped name, local folder or hub id. The weights become
        float32, whatever the precision in the file.

        Raises:
            NotFoundError: no aligner of that name.
            UserError: its config or weights are damaged or inconsistent.
        """
        typed("aligner", model_id, Path)
        folder = checkpoints.aligner_path(str(model_id)) or Path(model_id)
        where = f"aligner {str(model_id)!r}"
        if not folder.is_dir():
            folder = _download(str(model_id), revision)
        if not (folder / CONFIG).is_file():
            raise NotFoundError(f"no aligner in {str(model_id)!r}: it has no {CONFIG}")
        config = read_checked(AlignerConfig, folder / CONFIG)
        from kvalign.aligners.kinds import KINDS

        kind = KINDS.find(config.kind)
        try:
            with torch.device("meta"):  # no memory is taken before the shapes are compared
                aligner = kind(config)
        except (KeyError, TypeError, RuntimeError) as error:
            raise UserError(f"{where}: sizes do not make a {config.kind}: {error}") from None
        shapes = {name: tuple(x.shape) for name, x in aligner.state_dict().items()}
        weights = read_weights(folder / WEIGHTS, shapes, where)
        aligner.load_state_dict(weights, strict=True, assign=True)
        is_snapshot = folder.parent.name == "snapshots"  # in the hub's cache
        digest = folder.name if is_snapshot else sha256(folder / WEIGHTS)[:REVISION_LEN]
        aligner.source, aligner.revision = str(model_id), digest
        return aligner.requires_grad_(False).eval()


def new_config(kind: str, model: PreTrainedModel, spec: ModelSpec, **fields: Any) -> AlignerConfig:
    of_model = {name: getattr(spec, name) for name in OF_MODEL}
    fingerprint = embedding_fingerprint(model)
    return AlignerConfig(
        kind=kind, base_model=spec.name, embedding_fingerprint=fingerprint, **of_model, **fields
    )


def _no_aligner(name: str) -> str:
    if name in REMOVED:
        return unknown("aligner", name, checkpoints.ALIGNERS)
    if hub.is_path(name):
        return f"no aligner {name!r}: there is no such folder"
    near = nearest(name, checkpoints.ALIGNERS)
    hint = f"; did you mean {near}?" if near else ""
    names = ", ".join(checkpoints.ALIGNERS)
    return (
        f"no aligner {name!r}: neither a folder nor on the hub{hub.why_not()}{hint} (shipped: "
        f"{names}; yours: kvalign list aligners)"
    )


def _download(model_id: str, revision: str | None) -> Path:
    names, offline = [CONFIG, WEIGHTS], not hub.is_reachable()
    try:
        folder = snapshot_download(
            model_id, revision=revision, allow_patterns=names, local_files_only=offline
        )
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise NotFoundError(_no_aligner(model_id)) from error
    return Path(folder)
