"""Language models and how they encode positions: load one, and know what its KV cache looks like.

A family says what moving a cached entry means:

- `learned`: positions are added to the token embeddings; no closed form moves a key or a value.
- `rotary`: keys are rotated by their position (RoPE, Su et al. 2021); rotating back moves them
  exactly.
- `alibi`: positions are only in the attention bias, by place (Press et al. 2022); nothing needs to
  move.
"""

import difflib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from kvalign import checkpoints, fetched, gguf_file, hub, progress
from kvalign.errors import UserError
from kvalign.rope import Rotation

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
def load_model(name: str, device: str = "cpu", dtype: str = "float32") -> LoadedModel:
    """Load a causal LM of transformers with its tokenizer and spec.

    Args:
        name: a shipped name (`gpt2-mini`, `llama-mini`), one that was fetched (`kvalign models`), a
            hub id, a local folder or a GGUF file.
        device, dtype: as torch names them.

    Raises:
        UserError: a name that is neither, an architecture or RoPE scaling that cannot be shifted.
    """
    progress.phase(f"loading {name}")
    source = str(checkpoints.model_path(name) or fetched.model_path(name) or name)
    check_device(device)
    file = gguf_file.find(source)
    with without_bars():
        if file is None:
            model, tokenizer = _read(name, source, dtype)
        else:
            config = gguf_file.config_of(file)
            spec_of(config, name)  # refuse before the weights are read
            model, tokenizer = gguf_file.read(file, config, dtype)
    model.config.name_or_path = name
    model.to(device).eval()
    return LoadedModel(model, tokenizer, spec_of(model.config, name))


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


def _read(name: str, source: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    local = {"local_files_only": os.path.isdir(source) or not hub.is_reachable()}
    try:
        config = transformers.AutoConfig.from_pretrained(source, **local)
    except (OSError, ValueError) as error:
        raise UserError(_not_found(name, source, error)) from error
    spec_of(config, name)  # refuse before the weights are read
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=getattr(torch, dtype), use_safetensors=True, **local
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **local)
    except OSError as error:
        raise UserError(_not_found(name, source, error)) from error
    return model, tokenizer


def spec_of(config: PretrainedConfig, name: str = "") -> ModelSpec:
    """Describe a model from its config alone; UserError as of `load_model`."""
    kind = config.model_type
    if kind not in FAMILIES:
        raise UserError(
            f"{name or 'this model'} is a {kind!r} model, whose positions KV-Align does not know "
            f"(known: {', '.join(FAMILIES)}; to add one, see CONTRIBUTING.md)"
        )
    num_heads = config.num_attention_heads
    return ModelSpec(
        name=name or checkpoints.shipped_name(config.name_or_path),
        model_type=kind,
        family=FAMILIES[kind],
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        context_len=_context_len(config),
    )


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


def check_device(device: str) -> None:
    """Raise UserError for a device that this machine does not have."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        if "Expected one of" in reason:  # torch names all that it was ever built for
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


def _not_found(name: str, source: str, error: Exception) -> str:
    if os.path.isdir(source):
        return f"cannot load a model from folder {source!r}: {str(error).splitlines()[0]}"
    if name in fetched.MODELS:
        return f"{name} is not here: {fetched.how_to_fetch(name)}"
    near = difflib.get_close_matches(name, [*checkpoints.MODELS, *fetched.MODELS], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    unasked = "" if hub.is_reachable() else ", which does not answer"
    return (
        f"no model {name!r} here or on the hub{unasked}{hint} (works offline: "
        f"{', '.join(checkpoints.MODELS)}, or the path of a folder or a GGUF file)"
    )
