"""The place of the window: where the model computes best."""

import pytest
import torch
from helpers.methods import tables
from helpers.tiny_models import CONTEXT_LEN, VOCAB, tiny_model

from kvalign.training import table_run
from kvalign.training.placing import num_placed_tokens, place
from kvalign.training.text import Texts


def runs_of_tokens(num: int) -> Texts:
    """Each token is that of before, as a model with tied embeddings is inclined to say."""
    rng = torch.Generator().manual_seed(5)
    ids = torch.randint(2, VOCAB, (num // 100,), generator=rng).repeat_interleave(100)
    return Texts([ids], [ids[:1000]])


@pytest.mark.parametrize(("worst", "expected"), [(slice(0, 45), 48), (slice(45, None), 32)])
def test_the_window_lies_where_the_model_is_best(worst, expected):
    """There its embeddings of positions do not drown those of tokens."""
    model, text = tiny_model("gpt2"), runs_of_tokens(8000)
    model.transformer.wpe.weight.data[worst] *= 50
    table = tables(model)
    table_run.standardise(table, model, text.chunks("train", CONTEXT_LEN), ("key", "value"))
    found = place(table, model, text, seed=0)["placed"]
    assert table.config.positions == ((32, expected), (63, 63))
    assert [row["position"] for row in found] == [expected, 63]
    low, high = found[0]["nll"]
    assert (high < low) == (expected == 48) and found[0]["tried"] == [32, 48]


@pytest.mark.parametrize("kind", ["llama", "gpt_neo"])
def test_where_positions_are_none_to_choose_nothing_is_measured(kind):
    """Rotary ones, of which differences matter; layers that see a window of their own."""
    model, text = tiny_model(kind), runs_of_tokens(4000)
    table = tables(model)
    assert place(table, model, text, seed=0) == {} and num_placed_tokens(table, model, text) == 0
    assert table.config.positions == ()
