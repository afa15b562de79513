"""Bases of keys: what each head gives for an input of zeros. That is its key bias, if it has one.

It is measured, so that no architecture must be known by the names of its weights.
"""

from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvalign.foundation.autograd import no_autograd_modes
from kvalign.models.architectures import spec_of
from kvalign.models.wrapped import in_eval_mode

KeyBases = dict[int, Tensor]
"""Bases [H, 1, D] float32 by layer, of the layers that have one."""

_BASES: WeakKeyDictionary[PreTrainedModel, KeyBases] = WeakKeyDictionary()


def key_bases(model: PreTrainedModel) -> KeyBases:
    """Return the bases of a model's keys at position 0, measured at first use."""
    if model not in _BASES:
        _BASES[model] = _measure(model)
    return _BASES[model]


@no_autograd_modes()
def _measure(model: PreTrainedModel) -> KeyBases:
    cache = DynamicCache(config=model.config)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with ExitStack() as hooks, in_eval_mode([*model.modules()]):
        for module in model.modules():
            if "Attention" in type(module).__name__:
                hook = module.register_forward_pre_hook(_of_zeros, with_kwargs=True)
                hooks.callback(hook.remove)
        model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
    keys = {i: cache.layers[i].keys[0].float() for i in spec_of(model.config).attention}
    return {i: x.clone() for i, x in keys.items() if x.any() and x.isfinite().all()}


def _of_zeros(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call of an attention module, with zeros for its hidden states."""
    if "hidden_states" in kwargs:
        zeros = torch.zeros_like(kwargs["hidden_states"])
        return args, kwargs | {"hidden_states": zeros}
    return (torch.zeros_like(args[0]), *args[1:]), kwargs
