"""What every aligner is: trained parts made for one base model, in a folder of safetensors and a
config that says so.

An aligner corrects the kept entries of the cache after an eviction. The rotation of a rotary model
is not its business (`kvalign.realign`), so an aligner that adds nothing is StreamingLLM.
"""

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import ModelCard, PyTorchModelHubMixin, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvalign import checkpoints, hub
from kvalign.aligners.card import card_text
from kvalign.files import write_text, write_whole
from kvalign.models import ModelSpec, spec_of

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
_PROBE_LEN = 16


@dataclass(frozen=True, kw_only=True)
class AlignerConfig:
    """What an aligner was made for, and how.

    Attributes:
        kind: name in the registry of aligner kinds.
        base_model: the model's name when it was recorded; informative, a folder may have moved.
        probe: 16 embedding weights of the base model, by which its weights are recognised.
        chunk_len: tokens of a recorded chunk; caches up to `chunk_len - 1` entries can be aligned.
        shifts: numbers of entries evicted at once that it was trained on.
        sizes: sizes of the kind's own parts.
        training: data, settings and versions it came from; informative.
    """

    kind: str
    base_model: str
    family: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    probe: tuple[float, ...]
    chunk_len: int
    num_sinks: int
    shifts: tuple[int, ...]
    sizes: dict[str, int] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "AlignerConfig":
        """Raises ValueError naming what is missing, unknown or of the wrong type."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        if not isinstance(values, dict):
            raise ValueError(f"an aligner's config must be an object, got {type(values).__name__}")
        missing = [
            n
            for n, f in known.items()
            if n not in values and f.default_factory is dataclasses.MISSING
        ]
        if missing or values.keys() - known:
            unknown = sorted(values.keys() - known)
            raise ValueError(
                f"not an aligner's config: missing {missing or 'none'}, unknown {unknown or 'none'}"
            )
        for name in ("kind", "base_model", "family"):
            if not isinstance(values[name], str):
                raise ValueError(f"aligner config: {name} must be a text, got {values[name]!r}")
        if not isinstance(values.get("training", {}), dict):
            raise ValueError("aligner config: training must be an object, by target")
        for name in ("num_layers", "num_kv_heads", "head_dim", "chunk_len", "num_sinks"):
            if not isinstance(values[name], int) or not 0 <= values[name] < 2**31:
                raise ValueError(f"aligner config: {name} must be a count, got {values[name]!r}")
        shifts, probe_weights, sizes = values["shifts"], values["probe"], values.get("sizes", {})
        if not _are(int, shifts) or min(shifts) < 1:
            raise ValueError(f"aligner config: shifts must be counts, got {shifts!r}")
        if not _are(float, probe_weights) or len(probe_weights) != _PROBE_LEN:
            raise ValueError(f"aligner config: probe must be {_PROBE_LEN} numbers")
        if not isinstance(sizes, dict) or (sizes and not _are(int, list(sizes.values()))):
            raise ValueError(f"aligner config: sizes must be counts by name, got {sizes!r}")
        return cls(**{**values, "shifts": tuple(shifts), "probe": tuple(probe_weights)})

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
        shift: entries evicted: the places each kept entry moves towards the start.
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
    kinds: ClassVar[dict[str, type["Aligner"]]] = {}

    def __init__(self, config: AlignerConfig):
        super().__init__()
        self.config = config

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Aligner.kinds[cls.kind] = cls

    @property
    def label(self) -> str:
        """What tables of results call it: its kind, and what it was trained on if not `mse`."""
        parts = self.config.training.values()
        objectives = {part.get("objective", "mse") for part in parts if isinstance(part, dict)}
        return "-".join([self.config.kind, *sorted(objectives - {"mse"})])

    def anchor(
        self, layer: int, keys: Tensor, values: Tensor, born: Tensor | slice
    ) -> tuple[Tensor, Tensor]:
        """What to keep of new entries, from which `realign` starts unless it is recursive.

        Args:
            layer: index of the layer.
            keys: [B, H, S, D], rotated back to position 0 where the model is rotary.
            values: [B, H, S, D].
            born: the positions they were computed at, [S] int64 or a slice of length S.

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

    def check(
        self, model: PreTrainedModel, cache_size: int, num_sinks: int, num_evicted: int
    ) -> None:
        """Raise ValueError, naming the field, if this aligner was not made for such a model or
        cache.
        """
        spec = spec_of(model.config)
        for name in ("family", "num_layers", "num_kv_heads", "head_dim"):
            _match(name, getattr(self.config, name), getattr(spec, name), self.config.base_model)
        if not has_probe(model, self.config.probe):
            raise ValueError(
                f"this aligner was made for {self.config.base_model}: probe (its embedding "
                "weights) differs from this model's; train an aligner for it with gen-data and "
                "train"
            )
        if cache_size >= self.config.chunk_len:
            raise ValueError(
                f"cache_size must be at most {self.config.chunk_len - 1} with this aligner (it was "
                f"recorded with chunk_len {self.config.chunk_len}), got {cache_size}"
            )

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """The README.md that `save_pretrained` writes where there is none."""
        return ModelCard(card_text(self.config))

    def _save_pretrained(self, save_directory: Path) -> None:
        config = json.dumps(dataclasses.asdict(self.config), indent=1) + "\n"
        write_text(save_directory / CONFIG, config)
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.state_dict().items()}
        write_whole(save_directory / WEIGHTS, lambda path: save_file(tensors, path))

    # Fewer options than the mixin's: an aligner's kind and sizes come from its config.
    @classmethod
    def from_pretrained(cls, model_id: str | Path, *, revision: str | None = None) -> "Aligner":  # type: ignore[override]
        """Load an aligner of any kind: a shipped name, a local folder or a hub id.

        Raises:
            FileNotFoundError: there is none of that name.
            ValueError: its config or weights are damaged or do not fit together.
        """
        folder = checkpoints.aligner_path(str(model_id)) or Path(model_id)
        if not folder.is_dir():
            folder = _download(str(model_id), revision)
        try:
            values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"no aligner in {str(model_id)!r}: it has no {CONFIG}"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{folder / CONFIG} is not JSON: {error}") from None
        config = AlignerConfig.from_dict(values)
        if config.kind not in Aligner.kinds:
            raise ValueError(
                f"unknown aligner kind {config.kind!r} (known: {', '.join(Aligner.kinds)})"
            )
        try:
            weights = load_file(folder / WEIGHTS)
        except (FileNotFoundError, SafetensorError) as error:
            raise ValueError(
                f"cannot read the weights of aligner {str(model_id)!r}: {error}"
            ) from None
        try:
            with torch.device("meta"):  # no memory is taken before the shapes are compared
                aligner = Aligner.kinds[config.kind](config)
        except (KeyError, TypeError, RuntimeError) as error:
            raise ValueError(
                f"aligner {str(model_id)!r}: sizes do not make a {config.kind}: {error}"
            ) from None
        for name, expected in aligner.state_dict().items():
            found = weights.get(name)
            if found is None or found.shape != expected.shape:
                shape = "nothing" if found is None else tuple(found.shape)
                raise ValueError(
                    f"aligner {str(model_id)!r}: {name} must be {tuple(expected.shape)}, found "
                    f"{shape}"
                )
        aligner.load_state_dict(weights, strict=True, assign=True)
        return aligner.requires_grad_(False).eval()


def probe(model: PreTrainedModel) -> tuple[float, ...]:
    """A few embedding weights, spread over the vocabulary: nearly the same in any precision."""
    weight = model.get_input_embeddings().weight
    rows = torch.linspace(0, weight.shape[0] - 1, _PROBE_LEN).long().to(weight.device)
    columns = torch.linspace(0, weight.shape[1] - 1, _PROBE_LEN).long().to(weight.device)
    return tuple(round(x, 6) for x in weight.detach()[rows, columns].float().tolist())


def has_probe(model: PreTrainedModel, expected: Sequence[float]) -> bool:
    """Whether the model's embedding weights are those that `probe` gave, in any precision."""
    found = torch.tensor(probe(model))
    return len(expected) == len(found) and torch.allclose(
        torch.tensor(expected, dtype=found.dtype), found, rtol=2e-2, atol=1e-4
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
        probe=probe(model),
        **fields,
    )


def _are(kind: type, values: Any) -> bool:
    """Whether JSON gave a list of numbers of a kind, with at least one of them."""
    kinds = (int, float) if kind is float else (kind,)
    return (
        isinstance(values, list | tuple)
        and len(values) > 0
        and all(type(x) in kinds for x in values)
    )


def _match(name: str, expected: Any, found: Any, base_model: str) -> None:
    if expected != found:
        raise ValueError(
            f"this aligner was made for {base_model}: {name} is {expected} there, {found} in this "
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
        raise FileNotFoundError(
            f"no aligner {model_id!r}: neither a folder nor on the hub"
        ) from error
