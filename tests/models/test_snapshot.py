"""What a snapshot of a model sees."""

import copy

import pytest
import torch
from helpers.model_changes import CHANGES, OF_CODE
from helpers.tiny_models import tiny_model

from kvalign.steppers.compiled import Snapshot

NOT_PLAIN = {*OF_CODE, "a forward", "an adapter"}


@pytest.fixture
def llama():
    return copy.deepcopy(tiny_model("llama"))


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name, llama, monkeypatch):
    """Except that of weights where they lie."""
    before = Snapshot(llama)
    ids = torch.randint(96, (1, 9), generator=torch.Generator().manual_seed(0))
    logits = llama(input_ids=ids).logits
    assert before.holds() and before.is_plain
    CHANGES[name](llama, monkeypatch)
    assert not torch.allclose(llama(input_ids=ids).logits, logits, atol=1e-3)
    assert before.holds() == (name == "weights in place")
    assert before.code_holds() == (name not in OF_CODE)
    after = Snapshot(llama)
    assert after.holds() and after.is_plain == (name not in NOT_PLAIN)


def test_a_model_as_it_is_made_is_plain(model):
    snapshot = Snapshot(model)
    assert snapshot.is_plain and snapshot.holds()


def test_the_mode_and_what_transformers_leaves_on_a_model_are_no_changes(llama):
    """Hooks that collect hidden states stay, idle, after a call that has asked for them."""
    before = Snapshot(llama)
    llama(input_ids=torch.ones(1, 2).long(), output_hidden_states=True)
    llama.train()
    assert any(one._forward_hooks for one in llama.modules())
    after = Snapshot(llama)
    assert after.is_plain and before.code_holds()
