"""A GGUF file is a model as any: the weights and the tokenizer that are in it, or one line that
says what is wrong with it.
"""

import struct

import pytest
import torch
from helpers.refusals import refuses
from helpers.tiny_gguf import TEMPLATE, TOKENS, readers, write_gguf
from helpers.tiny_models import tiny_model

from kvalign import load_model, stream
from kvalign.foundation.errors import UserError
from kvalign.foundation.folders import folder_of
from kvalign.models import gguf_file

readers()
ENDS = dict(bos_token_id=1, eos_token_id=2)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", vocab_size=len(TOKENS), tie_word_embeddings=True, **ENDS)


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "tiny-llama.gguf"
    write_gguf(path, model)
    return path


def test_logits_and_tokens_are_those_of_the_model_it_was_made_of(file, model, ids):
    loaded = load_model(str(file))
    assert torch.equal(loaded.model(ids[:, :40]).logits, model(ids[:, :40]).logits)
    text = "Thus the 1 café ends"
    assert loaded.tokenizer.decode(loaded.tokenizer(text)["input_ids"]) == text
    assert TOKENS.index("Ġthe") in loaded.tokenizer(text)["input_ids"]
    assert loaded.tokenizer.chat_template == TEMPLATE
    assert loaded.model.generation_config.eos_token_id == TOKENS.index("<|im_end|>")
    assert loaded.spec.name == str(file) == loaded.model.config.name_or_path
    assert folder_of(str(file)).name == "tiny-llama"


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_other_architectures_are_read_as_well(kind, ids, tmp_path):
    shape = dict(head_dim=128) if kind == "qwen3" else {}  # what transformers takes it to be
    model = tiny_model(kind, vocab_size=len(TOKENS), **ENDS, **shape)
    write_gguf(tmp_path / "other.gguf", model)
    loaded = load_model(str(tmp_path / "other.gguf"))
    assert loaded.spec.model_type == kind
    assert torch.equal(loaded.model(ids[:, :40]).logits, model(ids[:, :40]).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_weights_are_unpacked_to_the_dtype(model, tmp_path, dtype):
    expected = write_gguf(tmp_path / "q8.gguf", model, quantised="Q8_0")
    found = load_model(str(tmp_path / "q8.gguf"), dtype=dtype).model.state_dict()
    assert set(found) == set(expected)
    for name, weights in found.items():
        assert weights.dtype == getattr(torch, dtype)
        assert torch.equal(weights, expected[name].to(weights.dtype))
    assert not torch.equal(found["lm_head.weight"].float(), model.lm_head.weight)


def test_it_streams_and_saves_as_a_model_of_any_other_file(file, tmp_path):
    loaded = load_model(str(file))
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    again = load_model(str(tmp_path))
    sizes = dict(cache_size=16, max_new_tokens=60, seed=0)
    texts = [
        "".join(stream(one.model, one.tokenizer, "the end", **sizes)) for one in (loaded, again)
    ]
    assert texts[0] == texts[1] and texts[0]


def test_a_folder_means_the_file_in_it_unless_there_are_weights_or_several(file, tmp_path):
    assert gguf_file.find(str(file.parent)) == file
    assert gguf_file.find(str(tmp_path)) is None and gguf_file.find("some/model") is None
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"has several GGUF files, name one of them: a.gguf, b.g"):
        load_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert gguf_file.find(str(tmp_path)) is None
    with pytest.raises(FileNotFoundError, match="there is no file 'none.gguf'"):
        load_model("none.gguf")


@pytest.mark.parametrize("share", [0, 0.01, 0.6])
def test_a_file_that_was_cut_is_said_to_be_unreadable_in_one_line(file, tmp_path, share):
    cut = tmp_path / "cut.gguf"
    whole = file.read_bytes()
    cut.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(
        UserError, match="cannot read the GGUF file '.*': it was cut or damaged"
    ) as raised:
        load_model(str(cut))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(architecture="warp"), "^cannot read.*architecture warp is not supported"),
        (dict(architecture="mamba"), "is a 'mamba' model, whose positions KV-Align does not know"),
        (dict(scaling="yarn"), r"does not read its RoPE scaling \(llama.rope.scaling.type\)"),
        (dict(leave_out="blk.1."), "it lacks 9 weights of the model, such as model.layers.1."),
    ],
)
def test_what_would_make_another_model_is_refused(model, tmp_path, changes, message, capsys):
    write_gguf(tmp_path / "other.gguf", model, **changes)
    with pytest.raises(UserError, match=message):
        load_model(str(tmp_path / "other.gguf"))
    assert capsys.readouterr() == ("", "")


def test_no_scaling_is_none(model, tmp_path):
    write_gguf(tmp_path / "plain.gguf", model, scaling="none")
    assert load_model(str(tmp_path / "plain.gguf")).spec.family == "rotary"


def test_missing_packages_are_named_with_the_command_that_brings_them(file, monkeypatch):
    found = gguf_file.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda n: None if n == "gguf" else found(n))
    with pytest.raises(UserError, match=r"read with gguf: pip install 'kvalign\[gguf\]'"):
        load_model(str(file))
    monkeypatch.undo()
    monkeypatch.setattr(gguf_file.transformers, "__version__", "5.4.0")
    with pytest.raises(UserError, match=r"read with transformers 5.18 or later: pip install"):
        load_model(str(file))


def field(name):
    """Where the type of a field stands, after its name."""
    return lambda data: data.index(name) + len(name)


CLAIMS = {
    "fields": (lambda data: 16, struct.pack("<Q", 2**62)),
    "a name": (lambda data: 24, struct.pack("<Q", 2**40)),
    "several tokens": (field(b"tokenizer.ggml.tokens"), struct.pack("<IIQ", 9, 8, 2**40)),
    "a type": (field(b"general.name"), struct.pack("<I", 99)),
    "layers": (field(b"llama.block_count"), struct.pack("<II", 4, 2**31 - 1)),
    "heads": (field(b"llama.attention.head_count"), struct.pack("<II", 4, 0)),
    "inner": (field(b"llama.feed_forward_length"), struct.pack("<II", 4, 0)),
}


@pytest.mark.parametrize(("place", "claim"), CLAIMS.values(), ids=CLAIMS)
def test_headers_that_claim_too_much(place, claim, file, tmp_path, capfd):
    data = bytearray(file.read_bytes())
    at = place(data)
    data[at : at + len(claim)] = claim
    (tmp_path / "t.gguf").write_bytes(data)
    capfd.readouterr()
    refuses(lambda: load_model(str(tmp_path / "t.gguf")), "t.gguf")
    assert capfd.readouterr() == ("", "")
