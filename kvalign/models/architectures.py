"""Families of language models: how each encodes positions, and the form of its KV cache.

The family says how a cached entry is moved:

- `learned`: positions are added to the token embeddings; no closed form moves a key or a value.
- `rotary`: keys are rotated by their position (RoPE, Su et al. 2021), and a rotation moves them
  exactly. Which layers rotate, and how, is measured (`rope.py`), so any architecture
  whose config mentions RoPE can be tried.
- `alibi`: positions are only in the attention bias, by place (Press et al. 2022); nothing
  needs to move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from kvalign import checkpoints
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import typed

if TYPE_CHECKING:  # they take seconds to import, and a list of models needs none of them
    from transformers import PretrainedConfig, PreTrainedModel

    from kvalign.models.rope import Rotation

Family = Literal["learned", "rotary", "alibi"]
_NAMES: dict[Family, str] = {
    "learned": "gpt2 opt gpt_neo gpt_bigcode",
    "alibi": "bloom mpt",
    "rotary": """
        llama mistral qwen2 qwen3 gpt_neox apertus arcee codegen cohere cohere2 ernie4_5
        exaone4 falcon gemma gemma2 gemma3_text glm glm4 gpt_oss gptj granite granitemoe
        helium lfm2 llama4_text ministral ministral3 mixtral nemotron olmo olmo2 olmo3 olmoe
        persimmon phi phi3 qwen2_moe qwen3_moe seed_oss smollm3 stablelm starcoder2
    """,
}
FAMILIES = {name: family for family, names in _NAMES.items() for name in names.split()}
"""Families of the architectures that are known, by `model_type` of the config."""
OWN_ATTENTION = {
    "gpt_neo": "a class of its own",
    "bloom": "ALiBi in a class of its own",
    "mpt": "ALiBi in a class of its own",
    "codegen": "a class of its own",
    "falcon": "classes of its own",
    "gemma2": "scores with a cap",
    "gpt_oss": "learned sink logits",
    "gptj": "a class of its own",
    "lfm2": "convolutions beside it",
}
"""Reason for which the attention of some is not a plain function of transformers' registry."""
REGISTERED = tuple(name for name in FAMILIES if name not in OWN_ATTENTION)
MASKED = ("bloom",)
"""Those with an attention of their own that accepts our mask."""

# Types of layers: with entries, and with a state in their place.
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
_STATES = ("conv", "linear_attention")
# Frequencies that do not depend on the length: any in-cache position is as good as another.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
# Frequencies that change beyond a length: exact as long as in-cache positions stay below it.
_LENGTH_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class ModelSpec:
    """Facts of a model for the cache.

    Attributes:
        name: as the user gave it: a shipped or fetched name, a hub id, a folder or a file.
        context_len: positions that the model was built for; None if nothing limits them.
        states: layers without attention, which have a state instead of entries.
        window: smallest number of entries that a layer sees; None: all layers see all.
    """

    name: str
    model_type: str
    family: Family
    num_layers: int
    num_kv_heads: int
    head_dim: int
    context_len: int | None
    states: tuple[int, ...] = ()
    window: int | None = None

    @property
    def attention(self) -> list[int]:
        """The other layers."""
        return [i for i in range(self.num_layers) if i not in self.states]

    def of_entries(self, num_rows: int, length: int, *width: int) -> tuple[int | None, ...]:
        """Shape of stored keys or values; None: any, in an architecture that is not known."""
        if self.model_type in FAMILIES:
            return num_rows, self.num_kv_heads, length, *width
        return num_rows, None, length, *[None] * len(width)


def spec_of(config: PretrainedConfig, name: str = "") -> ModelSpec:
    """Description of a model, from its config only.

    Raises:
        UserError: an unknown architecture without RoPE, impossible sizes, or a RoPE scaling that
            cannot be shifted.
    """
    family = FAMILIES.get(config.model_type) or ("rotary" if _ropes(config) else None)
    if getattr(config, "alibi", None) is True:  # one of Falcon's two ways
        family = "alibi"
    if family is None:
        others = [kind for kind in FAMILIES if FAMILIES[kind] != "rotary"]
        raise UserError(
            f"{name or 'this model'} is a {config.model_type!r} model, whose positions KV-Align "
            f"does not know (known: {', '.join(others)} and all with RoPE; to add one, see "
            "CONTRIBUTING.md)"
        )
    num_heads = _size(config, "num_attention_heads")
    num_kv_heads = _num_kv_heads(config, num_heads)
    head_dim = _size(config, "head_dim", _size(config, "hidden_size") // num_heads)
    is_local = config.model_type == "gpt_neo" and "local" in config.attention_layers
    context_len = _context_len(config, family)
    if not head_dim or num_heads % num_kv_heads or (head_dim % 2 and family == "rotary"):
        of = f"{num_heads} heads of size {head_dim}, {num_kv_heads} for keys and values"
        raise UserError(f"{name or 'this model'} cannot have {of}")
    return ModelSpec(
        name=name or checkpoints.shipped_name(config.name_or_path),
        model_type=config.model_type,
        family=family,
        num_layers=_size(config, "num_hidden_layers"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_len=context_len,
        states=_states(config, name),
        window=config.window_size if is_local else window_of(config),
    )


def _states(config: PretrainedConfig, name: str) -> tuple[int, ...]:
    """The layers of a hybrid that have a state and no attention."""
    kinds = getattr(config, "layer_types", None) or []
    if other := sorted({*kinds} - {*_ATTENTION, *_STATES}):
        raise UserError(
            f"{name or 'this model'} has layers of type {other[0]!r}, which KV-Align does not know "
            f"(known: {', '.join(_ATTENTION + _STATES)})"
        )
    states = tuple(i for i, kind in enumerate(kinds) if kind in _STATES)
    if states and config.model_type not in FAMILIES:
        raise UserError(
            f"{name or 'this model'} is a {config.model_type!r} model with layers that have a "
            "state instead of attention: only those of lfm2 are known"
        )
    return states


def _num_kv_heads(config: PretrainedConfig, num_heads: int) -> int:
    is_new = getattr(config, "new_decoder_architecture", False)
    if getattr(config, "multi_query", False) and not is_new:
        return 1
    name = "num_key_value_heads" if hasattr(config, "num_key_value_heads") else "num_kv_heads"
    return _size(config, name, num_heads)


def _size(config: PretrainedConfig, name: str, default: int | None = None) -> int:
    """A size in a config; UserError unless it is a whole number above 0."""
    value: Any = getattr(config, name, None)
    if value is None and default is not None:
        return default
    if typed(f"{name} of a model's config", value, int) < 1:
        raise UserError(f"{name} of a model's config must be at least 1, got {value}")
    return int(value)


def window_of(config: PretrainedConfig) -> int | None:
    """The smallest number of entries that a layer of the model sees; None: all layers see all."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    return getattr(config, "sliding_window", None) or None


_rotations: WeakKeyDictionary[PreTrainedModel, Rotation] = WeakKeyDictionary()


def rotation_of(model: PreTrainedModel) -> Rotation | None:
    """Return the exact rotation of the keys of a rotary model, measured at first use; None for
    other families.

    Raises:
        UserError: no rotation moves its keys.
    """
    from kvalign.models.rope import measured
    from kvalign.models.wrapped import unwrapped

    model = unwrapped(model)
    spec = spec_of(model.config)
    if spec.family != "rotary":
        return None
    if model not in _rotations:
        is_bounded = spec.context_len != model.config.max_position_embeddings or any(
            _rope_kind(rope) in _LENGTH_ROPE for rope in _ropes(model.config)
        )
        try:
            kinds = _kinds(model.config, spec)
            rotation = measured(model, kinds, spec.attention, spec.context_len, is_bounded)
        except UserError as error:
            raise UserError(
                f"the entries of {spec.name or 'this model'} ({spec.model_type}) cannot be "
                f"moved: {error}; use method discard-half or recompute, which move none"
            ) from None
        _rotations[model] = rotation
    return _rotations[model]


def _kinds(config: PretrainedConfig, spec: ModelSpec) -> list[Any]:
    """Kind of each layer: what the config says of it, in an architecture that is known."""
    if spec.model_type not in FAMILIES:
        return list(range(spec.num_layers))
    lists = [x for x in vars(config).values() if isinstance(x, list) and len(x) == spec.num_layers]
    return [[of_all[i] for of_all in lists] for i in range(spec.num_layers)]


def _context_len(config: PretrainedConfig, family: Family) -> int | None:
    if config.model_type == "mpt":
        return config.max_seq_len
    if family == "alibi":
        return None
    context_len = config.max_position_embeddings
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        # Beyond its first chunk a layer of Llama 4 forgets what is before.
        context_len = min(context_len, config.attention_chunk_size)
    for rope in _ropes(config):
        kind = _rope_kind(rope)
        if kind not in _FIXED_ROPE + _LENGTH_ROPE:
            raise UserError(
                f"RoPE scaling {kind!r} cannot be shifted: its keys are not a fixed rotation of "
                f"their position (known: {', '.join(_FIXED_ROPE + _LENGTH_ROPE)})"
            )
        if kind == "longrope":
            context_len = rope.get("original_max_position_embeddings") or context_len
    return context_len


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The parameters of RoPE that a config has: none, one for all layers, or one for each type."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    by_type = [x for x in rope.values() if isinstance(x, dict)]
    return by_type or [rope] * bool(rope)


def _rope_kind(rope: dict[str, Any]) -> str:
    return rope.get("rope_type", "default")
