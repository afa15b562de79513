"""A GGUF file is a model as any: the weights and the tokenizer that are in it, or one line that
says what is wrong with it.
"""

import pytest
import torch
from helpers.tiny_gguf import TEMPLATE, TOKENS, readers, write_gguf
from helpers.tiny_models import tiny_model

from kvalign import load_model
from kvalign.foundation.errors import UserError
from kvalign.foundation.folders import folder_of
from kvalign.models.model_folder import gguf_file

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
    """Whatever lies beside it: the folder has another tokenizer, without a template."""
    load_model("gpt2-mini").tokenizer.save_pretrained(file.parent)
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


def test_a_folder_means_the_file_in_it_unless_there_are_weights_or_several(file, tmp_path):
    assert gguf_file(str(file.parent)) == file
    assert gguf_file(str(tmp_path)) is None and gguf_file("some/model") is None
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"has several GGUF files, name one of them: a.gguf, b.g"):
        load_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert gguf_file(str(tmp_path)) is None
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
