"""Packed weights that are kept: a second start reads them, and has the same model."""

import copy
import os

import pytest
import torch
from helpers.hub_cache import put_into_cache
from helpers.tiny_gguf import TOKENS, readers, write_gguf
from helpers.tiny_models import KINDS, MORE_KINDS, tiny_model
from huggingface_hub import constants

from kvalign import load_model
from kvalign.foundation import hub
from kvalign.models import kernel, model_folder, packed, packed_file
from kvalign.models.identity import identity


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """The folder in which packed weights of any size are kept."""
    monkeypatch.setenv("KVALIGN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_file, "LEAST", 0)
    return tmp_path / "cache" / "packed"


@pytest.fixture(scope="session")
def tokenizer():
    return load_model("gpt2-mini").tokenizer


def saved(folder, kind, tokenizer, **changes):
    tiny_model(kind, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def unread(monkeypatch):
    """A function after whose call no model is read from its own files."""

    def refuse(*args, **kwargs):
        raise AssertionError("the model's own files are read")

    return lambda: monkeypatch.setattr(model_folder, "read", refuse)


def same(found, expected, ids):
    assert identity(found) == identity(expected)
    assert packed.weights_of(found) == packed.weights_of(expected)
    assert found.config.to_dict() == expected.config.to_dict()
    assert found.generation_config.to_dict() == expected.generation_config.to_dict()
    for of in ("named_parameters", "named_buffers"):
        own, others = (dict(getattr(model, of)()) for model in (found, expected))
        assert own.keys() == others.keys()
        for name, x in own.items():
            assert torch.equal(x, others[name]), name
            assert x.dtype == others[name].dtype and x.requires_grad == others[name].requires_grad
    assert not any(module.training for module in found.modules())
    ids = ids[:, :40]
    with torch.no_grad():
        assert torch.equal(found(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("kind", [*KINDS, *MORE_KINDS])
def test_every_architecture_is_read_as_it_was_packed(kind, tmp_path, ids):
    model = copy.deepcopy(tiny_model(kind)).requires_grad_()
    packed.pack(model, "int4")
    request = packed_file.PackedRequest(model.config, str(tmp_path), "cpu", "float32", "int4")
    assert request.read() is None
    request.keep(model, "int4")
    same(request.read().eval(), model, ids)


@pytest.mark.parametrize("change", ["buffer", "module"])
def test_a_model_that_is_more_than_its_config_is_packed_each_time(change, tmp_path):
    model = copy.deepcopy(tiny_model("llama"))
    if change == "buffer":
        model.model.register_buffer("own", torch.ones(3))
    else:
        model.model.layers[0].mlp.up_proj = torch.nn.Sequential(model.model.layers[0].mlp.up_proj)
    packed.pack(model, "int4")
    request = packed_file.PackedRequest(model.config, str(tmp_path), "cpu", "float32", "int4")
    request.keep(model, "int4")
    assert request.read() is None


@pytest.mark.parametrize("has_kernel", [True, False] if kernel.is_here() else [False])
def test_each_kernel_and_form_has_a_file_of_its_own(
    has_kernel, tokenizer, tmp_path, unread, ids, kept, monkeypatch
):
    monkeypatch.setattr(kernel, "is_here", lambda: has_kernel)
    folder = saved(tmp_path / "model", "gpt2", tokenizer, tie_word_embeddings=False)
    expected = {weights: load_model(folder, weights=weights).model for weights in packed.PACKED}
    assert len(list(kept.glob("model-*.safetensors"))) == 2
    unread()
    for weights in packed.PACKED:
        same(load_model(folder, weights=weights).model, expected[weights], ids)


@pytest.mark.parametrize("forms", [("auto", "int4"), ("int4", "auto")])
def test_weights_that_were_stored_in_4_bits_are_packed_once(forms, tmp_path, unread, ids):
    readers()
    model = tiny_model("llama", vocab_size=len(TOKENS), bos_token_id=1, eos_token_id=2)
    write_gguf(tmp_path / "tiny.gguf", model, quantised="Q4_1")
    first = load_model(tmp_path / "tiny.gguf", weights=forms[0])
    unread()
    for weights in forms:
        again = load_model(tmp_path / "tiny.gguf", weights=weights)
        same(again.model, first.model, ids % len(TOKENS))
        assert again.tokenizer.get_vocab() == first.tokenizer.get_vocab()


def test_auto_packs_no_other_weights_that_were_packed_by_request(tokenizer, tmp_path):
    folder = saved(tmp_path / "model", "llama", tokenizer)
    load_model(folder, weights="int4")
    assert packed.weights_of(load_model(folder, weights="auto").model) == "float32"


def test_a_model_of_the_hub_is_packed_once(tokenizer, tmp_path, unread, ids, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    put_into_cache(tmp_path / "hub", "me/tiny", saved(tmp_path / "tiny", "qwen2", tokenizer))
    expected = load_model("me/tiny", weights="int8").model
    unread()
    same(load_model("me/tiny", weights="int8").model, expected, ids)


def test_a_changed_model_is_packed_anew(tokenizer, tmp_path, ids, kept):
    folder = saved(tmp_path / "model", "llama", tokenizer)
    before = identity(load_model(folder, weights="int4").model)  # whose norms lie in the file
    file = folder / "model.safetensors"
    content, changed = file.read_bytes(), file.stat().st_mtime_ns
    file.write_bytes(content[:-100] + bytes(100))
    os.utime(
        file, ns=(changed, changed)
    )  # of the same size and time, as `tar` and `cp -p` leave it
    after = load_model(folder, weights="int4").model
    assert identity(after) != before and len([*kept.glob("*.safetensors")]) == 1
    same(load_model(folder, weights="int4").model, after, ids)


def test_what_was_changed_while_it_was_read_is_not_kept(tokenizer, tmp_path, kept, monkeypatch):
    folder, read = saved(tmp_path / "model", "llama", tokenizer), model_folder.read

    def read_and_change(*args):
        found = read(*args)
        tiny_model("llama", num_hidden_layers=1).save_pretrained(folder)
        return found

    monkeypatch.setattr(model_folder, "read", read_and_change)
    load_model(folder, weights="int4")
    assert not kept.exists()


def flipped(content):
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


@pytest.mark.parametrize("damage", [flipped, lambda content: content[:-1], lambda content: b""])
def test_a_damaged_file_is_made_anew(damage, tokenizer, tmp_path, unread, ids, kept, caplog):
    folder = saved(tmp_path / "model", "llama", tokenizer)
    expected = load_model(folder, weights="int4").model
    (file,) = kept.glob("*.safetensors")
    file.write_bytes(damage(file.read_bytes()))
    same(load_model(folder, weights="int4").model, expected, ids)
    assert f"{file} is damaged: it is made again" in caplog.text
    unread()
    same(load_model(folder, weights="int4").model, expected, ids)


def test_only_large_models_are_kept_and_only_packed_ones(tokenizer, tmp_path, kept, monkeypatch):
    folder = saved(tmp_path / "model", "llama", tokenizer)
    load_model(folder), load_model(folder, weights="auto")
    monkeypatch.undo()
    monkeypatch.setenv("KVALIGN_CACHE", str(kept.parent))
    load_model(folder, weights="int4")
    assert not kept.exists()


def test_a_full_disk_costs_nothing_but_the_file(tokenizer, tmp_path, kept, ids, caplog):
    folder = saved(tmp_path / "model", "llama", tokenizer)
    kept.parent.mkdir()
    kept.write_text("a file where the folder would be")
    first = load_model(folder, weights="int4").model
    same(load_model(folder, weights="int4").model, first, ids)
    assert caplog.text.count("packed weights are not kept") == 1
