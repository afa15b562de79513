"""Model of transformers inside its wrappers. Only this module unwraps it."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvalign.foundation.errors import UserError

_ATTRIBUTES = ("_orig_mod", "module", "model")
"""Names of the inner model in `torch.compile`, wrappers like DDP, and PEFT."""


def unwrapped(model: Any) -> PreTrainedModel:
    """The model itself. Layers of PEFT are inside it, and stay.

    Raises:
        UserError: PEFT puts its own tokens before each input (prompt and prefix tuning).
        TypeError: it contains no model of transformers.
    """
    outer = model
    while not isinstance(model, PreTrainedModel):
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            kind = type(model.active_peft_config).__name__
            raise UserError(
                f"a model with {kind} puts its own tokens before each input, unknown to a "
                "cache: use an adapter that changes layers, such as LoRA"
            )
        inners = (getattr(model, name, None) for name in _ATTRIBUTES)
        model = next((inner for inner in inners if isinstance(inner, nn.Module)), None)
        if model is None:
            raise TypeError(
                f"the model must be a causal LM of transformers, got {type(outer).__name__}: "
                "kvalign.load_model(name).model, or AutoModelForCausalLM.from_pretrained(name)"
            )
    return model
