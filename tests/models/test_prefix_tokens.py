"""What a tokenizer puts before a text is entry 0 of every stream, and no label moves for it."""

import pytest
import torch
from tokenizers import processors
from transformers import AutoTokenizer

from kvalign import checkpoints
from kvalign.models.input_ids import prefix_ids, with_prefix
from kvalign.training.pretraining_inputs import SINK, add_sink


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(checkpoints.model_path("gpt2-mini"))


def test_a_sink_token_is_put_before_a_text_also_once_saved(tokenizer, tmp_path):
    plain, text = len(tokenizer), "The history of the island"
    ids = tokenizer(text)["input_ids"]
    assert prefix_ids(tokenizer) == []
    add_sink(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert prefix_ids(one) == [plain] == [one.bos_token_id]
        assert one(text)["input_ids"] == [plain, *ids]
        assert one(text, add_special_tokens=False)["input_ids"] == ids
        assert one.decode([plain, *ids], skip_special_tokens=True) == text
        assert one.convert_ids_to_tokens(plain) == SINK and len(one) == plain + 1


def test_what_follows_a_text_is_no_prefix(tokenizer):
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    assert prefix_ids(tokenizer) == []


def test_a_prefix_takes_the_place_of_the_first_tokens():
    ids = torch.arange(12).view(2, 6)
    assert with_prefix(ids, []) is ids
    found = with_prefix(ids, [90, 91])
    assert found.tolist() == [[90, 91, 2, 3, 4, 5], [90, 91, 8, 9, 10, 11]]
    assert ids[0, 0] == 0
    assert with_prefix(ids[:, :1], [90, 91]).tolist() == [[90], [90]]
