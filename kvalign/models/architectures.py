"""Language models and how they encode positions: load one, and know what its KV cache looks like.

A family says what moving a cached entry means:

- `learned`: positions are added to the token embeddings; no closed form moves a key or a value.
- `rotary`: keys are rotated by their position (RoPE, Su et al. 2021); rotating back moves them
  exactly.
- `alibi`: positions are only in the attention bias, by place (Press et al. 2022); nothing needs to
  move.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from kvalign import checkpoints
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import DTYPES, typed
from kvalign.models import fetched, gguf_file, model_folder
from kvalign.models.rope import Rotation
from kvalign.models.weights import check_finite

Family = Literal["learned", "rotary", "alibi"]

FAMILIES: dict[str, Family] = {
    "gpt2": "learned",
    "opt": "learned",
    "gpt_neo": "learned",
    "llama": "rotary",
    "mistral": "rotary",
    "qwen2": "rotary",
    "qwen3": "rotary",
    "gpt_neox": "rotary",
    "bloom": "alibi",
    "mpt": "alibi",
}

# Frequencies that do not depend on the length: any in-cache position is as good as another.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
# Frequencies that change beyond a length: exact as long as in-cache positions stay below it.
_LENGTH_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class ModelSpec:
    """What the cache needs to know of a model.

    Attributes:
        name: as the user gave it: a shipped or fetched name, a hub id, a folder or a file.
        context_len: positions the model was built for; None where nothing limits them.
    """

    name: str
    model_type: str
    family: Family
    num_layers: int
    num_kv_heads: int
    head_dim: int
    context_len: int | None


@dataclass(frozen=True)
class LoadedModel:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    spec: ModelSpec


@progress.shown_as("kvalign")
def load_model(
    name: str | Path, device: str | torch.device = "cpu", dtype: str = "float32"
) -> LoadedModel:
    """Load a causal LM of transformers with its tokenizer and spec.

    Args:
        name: a shipped name (`gpt2-mini`, `llama-mini`), one that was fetched (`kvalign models`), a
            hub id, a local folder or a GGUF file.
        device, dtype: as torch names them.

    Raises:
        UserError: a name that is neither, an architecture or RoPE scaling that cannot be shifted.
    """
    typed("model", name, Path)
    name = os.fspath(name)
    device = str(device) if isinstance(device, torch.device) else typed("device", device, str)
    if dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r:.80}")
    progress.phase(f"loading {name}")
    source = str(checkpoints.model_path(name) or fetched.model_path(name) or name)
    check_device(device)
    file = gguf_file.find(source)
    with without_bars():
        if file is None:
            config = model_folder.config_of(name, source)
            spec_of(config, name)  # refuse before the weights are read
            model, tokenizer = model_folder.read(name, source, config, dtype)
        else:
            config = gguf_file.config_of(file)
            spec_of(config, name)
            model, tokenizer = gguf_file.read(file, config, dtype)
    model.config.name_or_path = name
    spec = spec_of(model.config, name)
    if rotation := rotation_of(model):
        check_finite([("rope_parameters: inv_freq", rotation.inv_freq)], f"the config of {name}")
    model.to(device).eval()
    model_folder.try_step(name, source, model)
    return LoadedModel(model, tokenizer, spec)


@contextmanager
def without_bars() -> Iterator[None]:
    """Let transformers load and save without bars of its own, which would be drawn over ours."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def spec_of(config: PretrainedConfig, name: str = "") -> ModelSpec:
    """Describe a model from its config alone; UserError as of `load_model`."""
    kind = config.model_type
    if kind not in FAMILIES:
        raise UserError(
            f"{name or 'this model'} is a {kind!r} model, whose positions KV-Align does not know "
            f"(known: {', '.join(FAMILIES)}; to add one, see CONTRIBUTING.md)"
        )
    num_heads = _size(config, "num_attention_heads")
    num_kv_heads = _size(config, "num_key_value_heads", num_heads)
    head_dim = _size(config, "head_dim", _size(config, "hidden_size") // num_heads)
    context_len = _context_len(config)
    if not head_dim or num_heads % num_kv_heads or (head_dim % 2 and FAMILIES[kind] == "rotary"):
        of = f"{num_heads} heads of size {head_dim}, {num_kv_heads} for keys and values"
        raise UserError(f"{name or 'this model'} cannot have {of}")
    if context_len is not None and not typed("context length", context_len, int) >= 2:
        raise UserError(f"the context length of {name or 'a model'} must be at least 2")
    return ModelSpec(
        name=name or checkpoints.shipped_name(config.name_or_path),
        model_type=kind,
        family=FAMILIES[kind],
        num_layers=_size(config, "num_hidden_layers"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_len=context_len,
    )


def _size(config: PretrainedConfig, name: str, default: int | None = None) -> int:
    """A size in a config; UserError unless it is a whole number above 0."""
    value: Any = getattr(config, name, None)
    if value is None and default is not None:
        return default
    if typed(f"{name} of a model's config", value, int) < 1:
        raise UserError(f"{name} of a model's config must be at least 1, got {value}")
    return int(value)


CLOSED_FORMS: dict[Family, Callable[[PreTrainedModel], Rotation]] = {
    "rotary": lambda model: Rotation(
        model.base_model.rotary_emb.inv_freq.float(),
        is_bounded=_rope_kind(model.config) in _LENGTH_ROPE,
    ),
}
"""What moves the keys of a family exactly, where there is such a thing."""


def rotation_of(model: PreTrainedModel) -> Rotation | None:
    """The closed form that moves the model's keys; None where its family has none."""
    make = CLOSED_FORMS.get(spec_of(model.config).family)
    return make(model) if make else None


# In torch's reasons that say nothing to a user, or name all that it was ever built for.
_NO_WORDS = ("Expected one of", "Could not run", "INTERNAL ASSERT", "No module named")


def check_device(device: str) -> None:
    """Raise UserError for a device that this machine does not have, or on which nothing is kept."""
    try:
        wanted = torch.device(device)
        if wanted.type == "cpu" and wanted.index:
            raise UserError(f"device {device!r} is not available here: there is one cpu")
        torch.zeros(1, device=wanted).item()
    except UserError:
        raise
    except Exception as error:  # each backend that is not there has a way of its own to say so
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        if device == "meta" or any(words in reason for words in _NO_WORDS):
            reason = (
                "did you mean cuda?" if device == "gpu" else "it takes cpu, cuda, cuda:1, mps, ..."
            )
        raise UserError(f"device {device!r} is not available here: {reason}") from error


def _context_len(config: PretrainedConfig) -> int | None:
    if config.model_type == "mpt":
        return config.max_seq_len
    if config.model_type == "bloom":
        return None
    context_len, kind = config.max_position_embeddings, _rope_kind(config)
    if kind in _FIXED_ROPE:  # or no rotary positions at all
        return context_len
    if kind not in _LENGTH_ROPE:
        raise UserError(
            f"RoPE scaling {kind!r} cannot be shifted: its keys are not a fixed rotation of their "
            f"position (known: {', '.join(_FIXED_ROPE + _LENGTH_ROPE)})"
        )
    original = config.rope_parameters.get("original_max_position_embeddings") or context_len
    return original if kind == "longrope" else context_len


def _rope_kind(config: PretrainedConfig) -> str:
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type", "default")
