"""Model as a user has it: inside wrappers, in training mode, with fresh PEFT layers, or in any of
autograd's modes. Only this module unwraps it, and it streams without dropout.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvalign.foundation.errors import UserError
from kvalign.foundation.progress import warn_once

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


@contextmanager
def in_eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Context with modules in eval mode, restored after it; a line is logged once for a change."""
    trained = [*filter(attrgetter("training"), modules)]
    if trained:
        warn_once(
            "the model is in training mode, at least in part: a stream runs it in eval mode, "
            "without dropout, and then restores the mode (model.eval() avoids this line)"
        )
    for module in trained:
        module.training = False
    try:
        yield
    finally:
        for module in trained:
            module.training = True


@contextmanager
def no_autograd_modes() -> Iterator[None]:
    """Context or decorator: tensors made within it can be written and read anywhere.

    A tensor made within `torch.inference_mode` cannot be written outside it, nor read where
    gradients are recorded. A tensor made with gradients keeps the graph of its passes alive.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
