"""What every aligner is: trained parts made for one base model, in a folder of safetensors and a
config that says so.

An aligner corrects the entries that stay in the cache after an eviction. The rotation of a rotary
model is not its business (`kvalign.realign`), so an aligner that adds nothing is StreamingLLM.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from huggingface_hub import ModelCard, PyTorchModelHubMixin, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from pydantic import AliasChoices, BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvalign import checkpoints, hub
from kvalign.aligners.card import card_text
from kvalign.aligners.kinds import KINDS
from kvalign.errors import NotFoundError, UserError
from kvalign.files import checked, read_json, write_json, write_whole
from kvalign.models import ModelSpec, spec_of
from kvalign.sizes import CacheSizes

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
FINGERPRINT_LEN = 16


Count = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Text = Annotated[str, Field(strict=True)]


class AlignerConfig(BaseModel):
    """What an aligner was made for, and how: the `config.json` of its folder.

    Attributes:
        kind: name in `kvalign.aligners.kinds.KINDS`.
        base_model: the model's name when it was recorded; informative, a folder may have moved.
        embedding_fingerprint: 16 embedding weights of the base model, by which it is recognised
            (`probe` in folders of version 0.1).
        chunk_len: tokens of a recorded chunk; caches up to `chunk_len - 1` entries can be aligned.
        num_sinks: of the recorded caches.
        shifts: numbers of entries evicted at once that it was trained on.
        sizes: sizes of the kind's own parts.
        training: data, settings and versions it came from, by part; informative.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    kind: Text
    base_model: Text
    family: Text
    num_layers: Count
    num_kv_heads: Count
    head_dim: Count
    embedding_fingerprint: Annotated[
        tuple[float, ...],
        Field(
            min_length=FINGERPRINT_LEN,
            max_length=FINGERPRINT_LEN,
            validation_alias=AliasChoices("embedding_fingerprint", "probe"),
        ),
    ]
    chunk_len: Count
    num_sinks: Count
    shifts: Annotated[tuple[Annotated[Count, Field(ge=1)], ...], Field(min_length=1)]
    sizes: dict[str, Count] = {}
    training: dict[str, Any] = {}

    @property
    def num_positions(self) -> int:
        """Places after the sinks that a recorded cache had once one entry was evicted: the most it
        can align.
        """
        return self.chunk_len - self.num_sinks - 1


@dataclass(frozen=True)
class Move:
    """One eviction, for the slots after the sinks.

    Attributes:
        shift: entries evicted: the places that each entry moves towards the start.
        first: number of sinks: the position of the first entry after them.
        now: [S] int64, the positions after the move: first, first + 1, ...
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
    """True: `realign` is given its own last output; False: what `anchor` returned at birth."""
    default_sizes: ClassVar[Mapping[str, int]] = {}
    """Sizes of the kind's own parts, by the names that `AlignerConfig.sizes` gives them."""
    default_num_sinks: ClassVar[int] = 0

    def __init__(self, config: AlignerConfig):
        super().__init__()
        self.config = config

    @property
    def label(self) -> str:
        """What tables of results call it: its kind, and what it was trained on if not `mse`."""
        parts = self.config.training.values()
        objectives = {part.get("objective", "mse") for part in parts if isinstance(part, dict)}
        return "-".join([self.config.kind, *sorted(objectives - {"mse"})])

    def anchor(
        self, layer: int, keys: Tensor, values: Tensor, birth: Tensor | slice
    ) -> tuple[Tensor, Tensor]:
        """What to keep of new entries, from which `realign` starts unless it is recursive.

        Args:
            layer: index of the layer.
            keys: [B, H, S, D], rotated back to position 0 where the model is rotary.
            values: [B, H, S, D].
            birth: the positions they were computed at, [S] int64 or a slice of length S.

        Returns:
            keys and values of the same shape.
        """
        return keys, values

    @abstractmethod
    def realign(
        self, layer: int, keys: Tensor, values: Tensor, move: Move
    ) -> tuple[Tensor, Tensor]:
        """Correct the entries after the sinks for the positions they have now.

        Args:
            layer: index of the layer.
            keys: [B, H, S, D]. Of a rotary model: rotated to their new positions if the aligner is
                recursive, else at position 0, to be rotated afterwards.
            values: [B, H, S, D].
            move: the eviction, and where each entry is now.

        Returns:
            keys and values of the same shape.
        """

    def check(self, model: PreTrainedModel, sizes: CacheSizes) -> None:
        """Raise UserError, naming the field, if this aligner was not made for such a model or
        cache.
        """
        spec = spec_of(model.config)
        for name in ("family", "num_layers", "num_kv_heads", "head_dim"):
            _match(name, getattr(self.config, name), getattr(spec, name), self.config.base_model)
        if not has_fingerprint(model, self.config.embedding_fingerprint):
            raise UserError(
                f"this aligner was made for {self.config.base_model}: the embedding weights "
                "of this model are others; train an aligner for it with kvalign train"
            )
        if sizes.cache_size >= self.config.chunk_len:
            raise UserError(
                f"cache_size must be at most {self.config.chunk_len - 1} with this aligner (it was "
                f"recorded with chunk_len {self.config.chunk_len}), got {sizes.cache_size}"
            )

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """The README.md that `save_pretrained` writes where there is none."""
        return ModelCard(card_text(self.config))

    def _save_pretrained(self, save_directory: Path) -> None:
        write_json(save_directory / CONFIG, self.config.model_dump(mode="json"))
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.state_dict().items()}
        write_whole(save_directory / WEIGHTS, lambda path: save_file(tensors, path))

    # Fewer options than the mixin's: an aligner's kind and sizes come from its config.
    @classmethod
    def from_pretrained(cls, model_id: str | Path, *, revision: str | None = None) -> "Aligner":  # type: ignore[override]
        """Load an aligner of any kind: a shipped name, a local folder or a hub id.

        Raises:
            NotFoundError: no aligner of that name.
            UserError: its config or weights are damaged or do not fit together.
        """
        folder = checkpoints.aligner_path(str(model_id)) or Path(model_id)
        if not folder.is_dir():
            folder = _download(str(model_id), revision)
        if not (folder / CONFIG).is_file():
            raise NotFoundError(f"no aligner in {str(model_id)!r}: it has no {CONFIG}")
        config = checked(AlignerConfig, read_json(folder / CONFIG), folder / CONFIG)
        kind = KINDS.find(config.kind)
        try:
            weights = load_file(folder / WEIGHTS)
        except (FileNotFoundError, SafetensorError) as error:
            raise UserError(
                f"cannot read the weights of aligner {str(model_id)!r}: {error}"
            ) from None
        try:
            with torch.device("meta"):  # no memory is taken before the shapes are compared
                aligner = kind(config)
        except (KeyError, TypeError, RuntimeError) as error:
            raise UserError(
                f"aligner {str(model_id)!r}: sizes do not make a {config.kind}: {error}"
            ) from None
        for name, expected in aligner.state_dict().items():
            weight = weights.get(name)
            if weight is None or weight.shape != expected.shape:
                shape = "nothing" if weight is None else tuple(weight.shape)
                raise UserError(
                    f"aligner {str(model_id)!r}: {name} must be {tuple(expected.shape)}, found "
                    f"{shape}"
                )
        aligner.load_state_dict(weights, strict=True, assign=True)
        return aligner.requires_grad_(False).eval()


def embedding_fingerprint(model: PreTrainedModel) -> tuple[float, ...]:
    """A few embedding weights, spread over the vocabulary: nearly the same in any precision."""
    weight = model.get_input_embeddings().weight
    rows = torch.linspace(0, weight.shape[0] - 1, FINGERPRINT_LEN).long().to(weight.device)
    columns = torch.linspace(0, weight.shape[1] - 1, FINGERPRINT_LEN).long().to(weight.device)
    return tuple(round(x, 6) for x in weight.detach()[rows, columns].float().tolist())


def has_fingerprint(model: PreTrainedModel, expected: Sequence[float]) -> bool:
    """Whether the model has the embedding weights of a fingerprint, in any precision."""
    actual = torch.tensor(embedding_fingerprint(model))
    return len(expected) == len(actual) and torch.allclose(
        torch.tensor(expected, dtype=actual.dtype), actual, rtol=2e-2, atol=1e-4
    )


def new_config(kind: str, model: PreTrainedModel, spec: ModelSpec, **fields: Any) -> AlignerConfig:
    """The config of an aligner to be trained for `model`."""
    return AlignerConfig(
        kind=kind,
        base_model=spec.name,
        family=spec.family,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        embedding_fingerprint=embedding_fingerprint(model),
        **fields,
    )


def _match(name: str, expected: Any, actual: Any, base_model: str) -> None:
    if expected != actual:
        raise UserError(
            f"this aligner was made for {base_model}: {name} is {expected} there, {actual} in this "
            f"model"
        )


def _download(model_id: str, revision: str | None) -> Path:
    try:
        return Path(
            snapshot_download(
                model_id,
                revision=revision,
                allow_patterns=[CONFIG, WEIGHTS],
                local_files_only=not hub.is_reachable(),
            )
        )
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise NotFoundError(f"no aligner {model_id!r}: neither a folder nor on the hub") from error
