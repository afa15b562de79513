"""Packed weights: those that were stored in 4 bits come back as the same 4 bits, products are those
of the unpacked weights, and everything streams with them.
"""

import copy
import pickle

import pytest
import torch
from helpers.pairwise import one_of_each
from helpers.tiny_gguf import TOKENS, readers, write_gguf
from helpers.tiny_models import KINDS, tiny_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from kvalign import load_model, load_stream, make_method, stream, verify
from kvalign.cache.int8 import Int8
from kvalign.cache.layer import Form
from kvalign.foundation.errors import UserError
from kvalign.invariants.subject import difference
from kvalign.models import kernel, packed
from kvalign.models.identity import embedding_fingerprint, has_fingerprint
from kvalign.models.packed import PackedLinear, RoundingLinear, TorchLinear, weights_of

BFLOAT16 = 2**-8  # what a number is rounded by at most
BYTE = 1 / 127  # the same, by the greatest of its group
HERE = [RoundingLinear, TorchLinear] if kernel.is_here() else [TorchLinear]


needs_kernel = pytest.mark.skipif(not kernel.is_here(), reason="no AVX2, or no compiler")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)  # an input that lies between two levels may be rounded to either


@pytest.fixture(params=[1, 2])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def mini():
    return load_model("llama-mini", weights="int4")


@pytest.mark.parametrize("kind", HERE)
def test_an_8_bit_file_keeps_its_numbers(kind):
    """PyTorch's kernel has scales of bfloat16, and gives such numbers: either is half a step."""
    readers()
    from gguf import GGMLQuantizationType, quants

    blocks = quants.quantize(torch.randn(128, 64).numpy(), GGMLQuantizationType.Q8_0)
    weight = torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType.Q8_0))
    found = kind(weight, 8).unpacked(torch.float32).T
    step = weight.abs().unflatten(1, (-1, 32)).amax(-1).repeat_interleave(32, 1) / 127
    assert ((found - weight).abs() <= (1e-3 if kind is RoundingLinear else 1.02) * step).all()


@pytest.mark.parametrize("kind", HERE)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_rows", [1, 49, 300])
@pytest.mark.parametrize("num_out", [10, 200])
def test_products_are_those_of_the_unpacked_weights(kind, bits, num_rows, num_out):
    weight, bias = torch.randn(num_out, 96), torch.randn(num_out)
    product, x = kind(weight, bits, bias), torch.randn(2, num_rows, 96)
    used = product.unpacked(torch.float32).T
    assert (used - weight).abs().max() < (0.3 if bits == 4 else 0.03)
    found, expected = product(x), nn.functional.linear(x, used, bias)
    assert found.dtype == x.dtype and found.shape == expected.shape
    # Inputs, weights and the result are rounded; the terms of a sum by chance up or down.
    bound = 2 * BYTE if kind is RoundingLinear else 2 * BFLOAT16
    assert (found - expected).norm() < bound * expected.norm()


@needs_kernel
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(1, 32), (16, 64), (23, 96), (64, 1536), (5000, 576)], ids=str)
def test_our_kernel_is_exact_but_for_inputs_of_8_bits(bits, shape, num_threads):
    """Whatever the rows that come together, to the bit."""
    product = RoundingLinear(torch.randn(shape), bits)
    x = torch.randn(48, shape[1]) * torch.rand(48, 1) * 100
    groups = x.unflatten(1, (-1, 32))
    most = groups.abs().amax(-1, keepdim=True)
    rounded = ((groups * (127 / most)).round() * most.double() / 127).flatten(1)
    found, expected = product(x), rounded @ product.unpacked(torch.float64)
    assert (found - expected).norm() < 1e-5 * expected.norm()
    for num_rows in range(1, 48):
        assert torch.equal(product(x[:num_rows]), found[:num_rows])
    assert product(x[:0]).shape == (0, shape[0])


@needs_kernel
def test_what_is_no_number_stays_none():
    product, x = RoundingLinear(torch.ones(4, 64), 4), torch.ones(4, 64)
    x[0, 3], x[1, 40], x[2] = torch.nan, torch.inf, 0
    found = product(x).isfinite().all(1)
    assert found.tolist() == [False, False, True, True] and (product(x)[2] == 0).all()


@needs_kernel
@pytest.mark.parametrize("dim", kernel.DIMS)
@pytest.mark.parametrize("length", [1, 64, 200])
@pytest.mark.parametrize("is_int8", [False, True])
def test_our_attention_is_that_of_pytorch(dim, length, is_int8, num_threads):
    """Also where scores differ by hundreds, and each row sees slots of its own."""
    form = (Int8 if is_int8 else Form)(torch.float32)
    query = 10 * torch.randn(3, 6, 1, dim)
    stored = form.encode(torch.randn(2, 3, 2, 300, dim))
    seen, places = [torch.randperm(300)[:num] for num in (length, 77, 1)], torch.full((3, 300), -1)
    for row, slots in enumerate(seen):
        places[row, slots] = torch.arange(len(slots))
    found, _ = kernel.attend(places, query, *stored, 0.5)
    for row, slots in enumerate(seen):
        keys, values = form.decode(stored[:, row, None][:, :, :, slots])
        expected = nn.functional.scaled_dot_product_attention(
            query[row, None], keys, values, scale=0.5, enable_gqa=True
        )
        torch.testing.assert_close(found[row, None], expected.transpose(1, 2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("weights", "kind"), one_of_each(packed.PACKED, KINDS))
def test_every_architecture_is_the_model_with_its_weights_unpacked(kind, weights, ids):
    model = copy.deepcopy(tiny_model(kind))
    tied = model.config.tie_word_embeddings
    expected = copy.deepcopy(model)
    packed.pack(model, weights)
    assert weights_of(model) == weights and model.dtype == torch.float32
    assert model.get_output_embeddings().bits == 8
    embedding = model.get_input_embeddings()
    assert (embedding.product is model.get_output_embeddings()) == tied
    products = dict(model.named_modules(remove_duplicate=False))
    assert not any(type(m) in (nn.Linear, Conv1D) for m in model.modules())
    for name, module in expected.named_modules():
        if isinstance(products[name], PackedLinear):
            weight = products[name].unpacked(torch.float32)
            module.weight.data.copy_(weight if isinstance(module, Conv1D) else weight.T)
    weight = embedding.product.unpacked(torch.float32).T
    expected.get_input_embeddings().weight.data.copy_(weight)
    assert torch.equal(embedding(ids), expected.get_input_embeddings()(ids))
    assert (
        copy.deepcopy(model).to(torch.bfloat16).get_input_embeddings()(ids).dtype == torch.bfloat16
    )
    with torch.no_grad():
        for length in (3, 60):  # by the kernel, and unpacked
            found = model(ids[:, :length]).logits
            assert difference(found, expected(ids[:, :length]).logits) < 0.2


def test_what_is_not_packed_is_said(caplog):
    """Of products whose inputs do not come in groups; a share that is large is no warning."""
    packed.pack(copy.deepcopy(tiny_model("llama")), "int8")
    assert not caplog.records
    packed.pack(copy.deepcopy(tiny_model("llama", intermediate_size=72)), "int8")
    (line,) = (record.message for record in caplog.records)
    assert line.startswith("int8: ")
    assert line.endswith(
        "% of the bytes of the weights are packed, not model.layers.*.mlp.down_proj.weight"
    )


def test_packed_weights_are_lost_nowhere(ids, tmp_path):
    """A copy, a pickle and a state have them; a folder that nothing reads is not written."""
    model = copy.deepcopy(tiny_model("llama"))
    other = copy.deepcopy(model)
    for one in (model, other):
        packed.pack(one, "int4")
    for name, x in other.named_buffers():
        if "inv_freq" not in name:
            x.zero_()
    other.load_state_dict(model.state_dict())
    for one in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(one(ids).logits, model(ids).logits)
    for save in (model.save_pretrained, model.push_to_hub):
        with pytest.raises(UserError, match="load it with weights=float32 and save that"):
            save(str(tmp_path))
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("kind", "expected"), [("Q4_0", "int4"), ("Q4_1", "int4"), ("Q8_0", "float32")]
)
def test_auto_keeps_4_bits_where_they_were_stored(kind, expected, ids, tmp_path):
    readers()
    model = tiny_model("llama", vocab_size=len(TOKENS), bos_token_id=1, eos_token_id=2)
    weights = write_gguf(tmp_path / "tiny.gguf", model, quantised=kind)
    loaded = load_model(tmp_path / "tiny.gguf", weights="auto")
    assert weights_of(loaded.model) == expected
    if expected == "int4":
        product = loaded.model.model.layers[1].self_attn.q_proj
        weight = weights["model.layers.1.self_attn.q_proj.weight"]
        found = product.unpacked(torch.float32).T
        torch.testing.assert_close(found, weight, rtol=0, atol=2 * BFLOAT16 * weight.abs().max())
    for asked, found in ({}, expected), ({"dtype": "float32"}, "float32"):
        assert weights_of(load_model(tmp_path / "tiny.gguf", **asked).model) == found


def test_a_saved_stream_goes_on_with_the_weights_it_was_made_with_and_no_others(mini, tmp_path):
    sizes = dict(cache_size=16, max_new_tokens=30, seed=0, do_sample=True)
    made = stream(mini.model, mini.tokenizer, "The river", **sizes)
    first = "".join(made)
    made.save(tmp_path / "talk.safetensors")
    made.feed(" and")
    rest = "".join(made)
    again = load_stream(tmp_path / "talk.safetensors", mini.model, mini.tokenizer)
    again.feed(" and")
    assert first and "".join(again) == rest
    plain = load_model("llama-mini")
    with pytest.raises(UserError, match=r"weights of int4, but this .* float32: .*--weights i"):
        load_stream(tmp_path / "talk.safetensors", plain.model, plain.tokenizer)


@pytest.mark.slow
@pytest.mark.usefixtures("short_runs")
def test_invariants_hold_within_the_bound_of_their_rounding(mini):
    names = ["dense", "rows", "chunks", "evicting-chunks", "repeat", "save"]
    outcomes = verify(
        mini.model,
        lambda model: make_method("streaming-llm", model, cache_size=8),
        invariants=names,
    )
    assert [outcome.state for outcome in outcomes] == ["passed"] * len(names)
    assert {outcome.bound for outcome in outcomes} == {0.8}


@pytest.mark.parametrize("weights", packed.PACKED)
def test_a_packed_model_has_the_fingerprint_of_its_weights_and_another_one_has_not(weights):
    expected = embedding_fingerprint(load_model("gpt2-mini").model)
    assert has_fingerprint(load_model("gpt2-mini", weights=weights).model, expected)
    assert not has_fingerprint(load_model("context-gpt2", weights=weights).model, expected)
