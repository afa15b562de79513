"""Packed weights on CUDA, without it: on a device that only tests have, with what PyTorch's two
operations for 4 bits are documented to do. Their shapes and types are also given to PyTorch itself.
"""

import copy

import pytest
import torch
from helpers.methods import make
from helpers.other_device import INSTEAD, NAME, moved
from helpers.pairwise import one_of_each
from helpers.tiny_models import KINDS, tiny_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kvalign.models import packed
from kvalign.models.packed import TorchLinear, pack, weights_of

aten = torch.ops.aten


def laid_out(pairs, tiles):
    """The first of two numbers lies in the high bits of a byte."""
    num_out, num_in = pairs.shape[0], 2 * pairs.shape[1]
    assert pairs.dtype == torch.uint8 and tiles in (2, 4, 8)
    assert num_out % 8 == 0 and num_in % (16 * tiles) == 0
    return pairs.view(torch.int32).view(num_out // 8, num_in // (16 * tiles), 32, tiles // 2)


def multiplied(rows, q, group, scales):
    """w = (q - 8) s + z, in groups of inputs."""
    pairs = q.flatten().view(torch.uint8).view(8 * q.shape[0], -1)
    q = torch.stack([pairs >> 4, pairs & 15], 2).flatten(1).float() - 8  # [N, K]
    assert rows.dtype == scales.dtype == torch.bfloat16 and rows.is_contiguous()
    assert scales.shape == (q.shape[1] // group, len(q), 2) and scales.is_contiguous()
    step, zero = scales.float().repeat_interleave(group, 0).unbind(2)  # [K, N]
    return (rows.float() @ (q.T * step + zero)).bfloat16()


@pytest.fixture(autouse=True)
def documented(monkeypatch):
    monkeypatch.setitem(INSTEAD, aten._convert_weight_to_int4pack.default, laid_out)
    monkeypatch.setitem(INSTEAD, aten._weight_int4pack_mm.default, multiplied)


@pytest.mark.parametrize(("kind", "weights"), one_of_each(KINDS, packed.PACKED))
def test_it_gives_what_a_cpu_gives(kind, weights, ids, monkeypatch):
    """With PyTorch's kernel, which keeps the same weights."""
    monkeypatch.setattr(packed.kernel, "is_here", lambda: False)
    plain = tiny_model(kind).to(torch.bfloat16)
    model, other = moved(copy.deepcopy(plain)), copy.deepcopy(plain)
    for one in (model, other):
        pack(one, weights)
        assert weights_of(one) == weights
    assert sum(isinstance(x, TorchLinear) for x in model.modules()) > 6
    assert type(model.get_input_embeddings()) is nn.Embedding
    methods = [make("recompute", x) for x in (model, other, plain)]
    found, expected, unpacked = (x.feed(ids[:, :40].to(x.model.device)).cpu() for x in methods)
    assert (found - expected).norm() < 0.05 * expected.norm()
    far = {"int4": 0.5, "int8": 0.1}[weights]
    assert 0 < (found - unpacked).norm() < far * unpacked.norm()


@pytest.mark.parametrize("num_in", [32, 64, 128, 96])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_and_weights(bits, num_in):
    torch.manual_seed(0)
    weight = torch.randn(40, num_in)
    there = TorchLinear(weight.to(NAME), bits, torch.ones(40, device=NAME))
    here = TorchLinear(weight, bits, torch.ones(40))
    for num_rows in (1, 60):
        rows = torch.randn(num_rows, num_in).bfloat16()
        found, expected = there(rows.to(NAME)).cpu().float(), here(rows).float()
        assert torch.allclose(found, expected, rtol=0.02, atol=0.1)
        rows = rows.float().requires_grad_().to(NAME)
        assert rows.requires_grad  # so it takes the unpacked weights
        found = there(rows).cpu()
        assert torch.allclose(found, expected, rtol=0.02, atol=0.2)
    found, expected = there.unpacked(torch.float32).cpu(), here.unpacked(torch.float32)
    assert torch.allclose(found, expected, rtol=0.01, atol=0.01)
    with FakeTensorMode():  # PyTorch's own checks of shapes and types
        levels = torch.empty(64, num_in * bits // 4, dtype=torch.uint8, device=NAME)
        fake = there.laid_out(levels)
        assert (fake.shape, fake.dtype) == (there.packed.shape, there.packed.dtype)
        scales = torch.empty(there.scales.shape, dtype=torch.bfloat16, device=NAME)
        there._buffers = {"packed": fake, "scales": scales}
        out = there.product(torch.empty(5, num_in, dtype=torch.bfloat16, device=NAME))
    assert (out.shape, out.dtype, out.device.type) == ((5, 40), torch.bfloat16, NAME)
