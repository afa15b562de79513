"""Tables with a network on what is written, and training against the LM's whole context."""

import pytest
import torch
from helpers.tiny_corpus import TEXT, byte_tokenizer
from helpers.tiny_models import CONTEXT_LEN, tiny_model

from kvalign.aligners import Aligner
from kvalign.foundation.errors import UserError
from kvalign.models.architectures import spec_of
from kvalign.models.loading import LoadedModel
from kvalign.training import train_table_network
from kvalign.training.table_objectives import STRIDE, context_logits


def tiny(kind, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    model = tiny_model(kind)
    loaded = LoadedModel(model, byte_tokenizer(64, TEXT), spec_of(model.config, "tiny"))
    return loaded, dict(corpus=f"text:{tmp_path / 'text.txt'}", num_tokens=2000, chunk_len=32)


@pytest.mark.parametrize("target", ["both", "value"])
def test_network_is_trained_for_the_parts_that_were_asked_for(target, tmp_path):
    loaded, options = tiny("gpt2", tmp_path)
    options |= dict(hidden=4, max_steps=3, judge=False, target=target, chunk_len=CONTEXT_LEN)
    results = train_table_network(out=tmp_path / "out", loaded=loaded, **options)
    record = results["value"]
    assert record["objective"] == "context" and record["val_after"] <= record["val_before"]
    trained = Aligner.from_pretrained(tmp_path / "out")
    assert trained.config.last_position == CONTEXT_LEN * 15 // 16
    for net in trained.network:
        is_trained = {"key": net.key.weight.any().item(), "value": net.value.weight.any().item()}
        assert is_trained == {"key": target == "both", "value": True}


def test_it_is_for_learned_positions(tmp_path):
    loaded, options = tiny("llama", tmp_path)
    with pytest.raises(UserError, match="table-network is for learned positions, not rotary"):
        train_table_network(out=tmp_path / "out", loaded=loaded, **options)


def test_teacher_sees_as_far_back_as_its_context_length_allows():
    model = tiny_model("gpt2")
    ids = torch.randint(60, (2, CONTEXT_LEN + STRIDE + 5))
    logits = context_logits(model, ids, 10)
    assert logits.shape[1] == ids.shape[1] - 10
    whole = model(ids[:, :CONTEXT_LEN]).logits[:, 10:]
    assert torch.allclose(logits[:, : CONTEXT_LEN - 10], whole, atol=1e-5)
    last = model(ids[:, -CONTEXT_LEN:]).logits[:, -1]
    assert torch.allclose(logits[:, -1], last, atol=1e-5)
