"""Families of language models: how each encodes positions, and what its KV cache looks like.

A family says what moving a cached entry means:

- `learned`: positions are added to the token embeddings; no closed form moves a key or a value.
- `rotary`: keys are rotated by their position (RoPE, Su et al. 2021); rotating back moves them
  exactly.
- `alibi`: positions are only in the attention bias, by place (Press et al. 2022); nothing needs to
  move.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PretrainedConfig, PreTrainedModel

from kvalign import checkpoints
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import typed
from kvalign.models.rope import Rotation

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


def spec_of(config: PretrainedConfig, name: str = "") -> ModelSpec:
    """Describe a model from its config alone.

    Raises:
        UserError: an architecture that is not known, sizes that no model has, or a RoPE scaling
            that cannot be shifted.
    """
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
