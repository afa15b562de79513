"""Changes in memory of a Llama, each of which changes its logits. pytest takes back what is not on
the model itself.
"""

import pytest
import torch
from torch import nn
from torch.nn.modules import module as of_all
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP


def _mlp(model):
    return model.model.layers[0].mlp


def _hook(model, patch):
    _mlp(model).register_forward_hook(lambda module, args, out: torch.zeros_like(out))


def _pre_hook(model, patch):
    _mlp(model).register_forward_pre_hook(lambda module, args: (torch.zeros_like(args[0]),))


def _hook_of_all(model, patch):
    def zeroed(module, args, out):
        return torch.zeros_like(out) if isinstance(module, LlamaMLP) else None

    patch.setitem(of_all._global_forward_hooks, -1, zeroed)


def _forward(model, patch):
    _mlp(model).forward = torch.zeros_like


def _forward_of_class(model, patch):
    patch.setattr(LlamaMLP, "forward", lambda module, x: torch.zeros_like(x))


def _function(model, patch):
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *args, **kwargs: (q, k))


def _module(model, patch):
    model.model.layers[0].mlp = nn.Identity()


def _adapter(model, patch):
    peft = pytest.importorskip("peft")
    names = ["q_proj", "down_proj"]
    lora = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=names)
    peft.inject_adapter_in_model(lora, model)


def _data(model, patch):
    weight = _mlp(model).down_proj.weight
    weight.data = torch.zeros_like(weight)


def _parameter(model, patch):
    _mlp(model).down_proj.weight = nn.Parameter(torch.zeros_like(_mlp(model).down_proj.weight))


def _assigned(model, patch):
    model.load_state_dict({k: 2 * x for k, x in model.state_dict().items()}, assign=True)


def _in_place(model, patch):
    with torch.no_grad():
        _mlp(model).down_proj.weight.zero_()


def _scaling(model, patch):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3


def _eps(model, patch):
    model.model.norm.variance_epsilon = 1.0


def _eps_of_each(model, patch):
    model.model.norm.variance_epsilon = torch.linspace(0, 1, model.config.hidden_size)


def _activation(model, patch):
    _mlp(model).act_fn = nn.Tanh()


OF_CODE = ("a hook", "a hook before", "a hook of all modules", "a forward of a class")
CHANGES = {
    "a hook": _hook,
    "a hook before": _pre_hook,
    "a hook of all modules": _hook_of_all,
    "a forward": _forward,
    "a forward of a class": _forward_of_class,
    "a function": _function,
    "another module": _module,
    "an adapter": _adapter,
    "other data": _data,
    "another parameter": _parameter,
    "assigned weights": _assigned,
    "weights in place": _in_place,
    "an attribute": _scaling,
    "a number of a norm": _eps,
    "a number that becomes a tensor": _eps_of_each,
    "another activation": _activation,
}
