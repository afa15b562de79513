"""The identity of a model changes with any number of any weight, and with nothing else."""

import copy

import pytest
import torch
from helpers.other_weights import change, copy_of
from helpers.tiny_models import MORE_KINDS, tiny_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from kvalign import load_model
from kvalign.foundation.errors import UserError
from kvalign.models import identity as module
from kvalign.models import kernel, loading, packed
from kvalign.models.identity import identity, identity_of
from kvalign.models.model_folder import quiet
from kvalign.models.packed import RoundingLinear, TorchLinear

HERE = [RoundingLinear, TorchLinear] if kernel.is_here() else [TorchLinear]

RENAMED = ("gpt_neox", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bloom", *MORE_KINDS[::9]])
def test_files_have_the_identity_of_the_model_in_float32(kind, dtype, tmp_path):
    """In one file or several; models whose names transformers changes at loading are loaded."""
    tiny = tiny_model(kind).to(dtype)
    with quiet():
        tiny.save_pretrained(tmp_path, max_shard_size="40KB" if dtype == torch.float32 else "5GB")
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    from_files = module._of_folder(kind, str(tmp_path))
    assert from_files == (None if kind in RENAMED else identity(model))


def test_a_folder_is_read_without_making_the_model(tmp_path, monkeypatch):
    folder = copy_of("llama-mini", tmp_path / "m")
    expected, renamed = identity_of("llama-mini"), tmp_path / "model.safetensors"
    weights = load_file(folder / "model.safetensors")
    save_file({x.removeprefix("model."): w for x, w in weights.items()}, renamed)
    with monkeypatch.context() as only_here:
        only_here.setattr(loading, "load_model", None)
        assert identity_of(str(folder)) == expected
        change(folder)
        assert identity_of(str(folder)) != expected
        renamed.replace(folder / "model.safetensors")
        assert identity_of(str(folder)) == expected, "as of a model without a head"
    save_file({x.replace("mlp", "ffn"): w for x, w in weights.items()}, renamed)
    renamed.replace(folder / "model.safetensors")
    with pytest.raises(UserError, match="it lacks 18 weights of the model"):
        identity_of(str(folder))


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
