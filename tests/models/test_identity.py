"""The identity of a model changes with any number of any weight, and with nothing else."""

import copy

import pytest
import torch
from helpers.other_weights import change, copy_of
from helpers.tiny_models import tiny_model
from torch import nn

from kvalign import load_model
from kvalign.models import identity as module
from kvalign.models import kernel, packed
from kvalign.models.identity import identity, identity_of
from kvalign.models.packed import RoundingLinear, TorchLinear

HERE = [RoundingLinear, TorchLinear] if kernel.is_here() else [TorchLinear]


@pytest.fixture
def model():
    return tiny_model("llama")


def test_each_weight_counts_and_each_number_of_it(model):
    found = {identity(model)}
    for x in model.state_dict().values():
        flat = x.view(-1)
        before = flat[-1].clone()
        flat[-1] = before.nextafter(torch.tensor(torch.inf))
        found.add(identity(model))
        flat[-1] = before
    assert len(found) == len(model.state_dict()) + 1
    assert identity(model) in found and identity(copy.deepcopy(model)) in found


def test_a_shared_weight_counts_under_each_name(model):
    model = tiny_model("gpt2")
    before = identity(model)
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    assert identity(model) == before, "of the same numbers"
    with torch.no_grad():
        head.weight[0, 0] += 1
    assert identity(model) != before


@pytest.mark.parametrize("kind", HERE)
@pytest.mark.parametrize("weights", packed.PACKED)
def test_packed_weights_are_identified_by_levels_and_scales(weights, kind, monkeypatch):
    monkeypatch.setattr(kernel, "is_here", lambda: kind is RoundingLinear)
    first, again = (load_model("llama-mini", weights=weights).model for _ in range(2))
    assert identity(first) == identity(again)
    product = again.model.layers[3].mlp.down_proj
    for x in product.buffers():
        before = identity(again)
        raw = x.view(torch.uint8).view(-1)
        raw[-1] ^= 1
        assert identity(again) != before
    plain = load_model("llama-mini").model
    assert identity(plain) != identity(first)
    with torch.no_grad():
        plain.model.layers[3].mlp.down_proj.weight[0, 0] *= 4
    packed.pack(plain, weights)
    assert identity(plain) != identity(first)


def test_a_folder_has_the_identity_of_its_model_in_float32(tmp_path):
    folder = copy_of("llama-mini", tmp_path / "m")
    expected = identity(load_model("llama-mini", dtype="float32").model)
    assert identity_of(str(folder)) == expected
    change(folder)
    assert identity_of(str(folder)) != expected


def test_it_is_computed_once_until_a_tensor_is_written_or_replaced(model, monkeypatch):
    read = []
    monkeypatch.setattr(module, "_about", lambda x, about=module._about: read.append(x) or about(x))
    before, num = identity(model), len({id(x) for x in model.parameters()})
    assert identity(model) == before and len(read) == num
    weight = model.model.layers[1].mlp.down_proj.weight
    numbers = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(2)  # another version
    assert identity(model) != before and len(read) == 2 * num
    weight.data = numbers  # another address
    assert identity(model) == before and len(read) == 3 * num
    model.to(torch.bfloat16)
    assert identity(model) != before
