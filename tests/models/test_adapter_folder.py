"""A model's folder with an adapter of PEFT beside its weights: the adapter is merged into them."""

import copy

import pytest
import torch
from helpers.tiny_models import tiny_model

from kvalign import load_model
from kvalign.foundation.errors import UserError
from kvalign.models import model_folder, packed

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's own
IDS = torch.arange(20)[None]


def saved(folder, kind="llama", **options):
    """Write such a folder, and return the model that PEFT merges of it, in float32."""
    copy.deepcopy(tiny_model(kind, vocab_size=8192)).bfloat16().save_pretrained(folder)
    load_model("gpt2-mini").tokenizer.save_pretrained(folder)
    model = load_model(folder).model
    config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    with_adapter = peft.get_peft_model(model, config)
    with_adapter.save_pretrained(folder)
    return with_adapter.merge_and_unload()


@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_it_is_merged_and_then_packed(more, tmp_path):
    expected = saved(tmp_path / "m", target_modules=["q_proj", "v_proj"], **more)
    found = load_model(tmp_path / "m").model
    torch.testing.assert_close(found(IDS).logits, expected(IDS).logits, rtol=1e-4, atol=1e-4)
    assert {*found.state_dict()} == {*expected.state_dict()}
    assert load_model(tmp_path / "m", dtype="bfloat16").model.dtype == torch.bfloat16
    packed.pack(expected, "int8")
    found = load_model(tmp_path / "m", weights="int8").model
    torch.testing.assert_close(found(IDS).logits, expected(IDS).logits, rtol=1e-2, atol=1e-2)


def test_what_cannot_be_merged_is_refused(tmp_path):
    saved(tmp_path / "m", target_modules=["embed_tokens"])
    assert load_model(tmp_path / "m").model(IDS).logits.isfinite().all()
    saved(tmp_path / "tied", "gpt2", target_modules=["wte"])
    with pytest.raises(UserError, match="cannot be merged into its weights"):
        load_model(tmp_path / "tied")


def test_without_peft_it_is_not_left_out(tmp_path, monkeypatch):
    saved(tmp_path / "m", target_modules=["q_proj"])
    monkeypatch.setattr(model_folder, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="it has an adapter, which is read with peft"):
        load_model(tmp_path / "m")
