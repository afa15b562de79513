"""The bare step: a pass over C + 1 entries, of which one is overwritten where it lies."""

import pytest
import torch
from helpers.tiny_models import KINDS, VOCAB, tiny_model

from kvalign.eval.evaluations.latency.bare_step import BareStep
from kvalign.methods.registry import METHODS

CACHE_SIZE = 20


def random_ids(num_rows, num_tokens):
    return torch.randint(VOCAB, (num_rows, num_tokens), generator=torch.manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_a_pass_over_the_same_entries(kind):
    """Each token takes the last place: what a plain pass gives after the first C and that one."""
    model = tiny_model(kind)
    bare, ids = BareStep(model, CACHE_SIZE), random_ids(2, CACHE_SIZE + 4)
    first = bare.feed(ids[:, : CACHE_SIZE + 1])
    plain = model(input_ids=ids[:, : CACHE_SIZE + 1]).logits[:, -1]
    torch.testing.assert_close(first, plain, rtol=1e-4, atol=1e-4)
    for token in ids[:, CACHE_SIZE + 1 :].split(1, dim=1):
        seen = torch.cat([ids[:, :CACHE_SIZE], token], 1)
        plain = model(input_ids=seen).logits[:, -1]
        torch.testing.assert_close(bare.feed(token), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_first", [1, CACHE_SIZE, 3 * CACHE_SIZE])
def test_the_buffer_stays_where_it_is(num_first):
    """Whatever the first input, a step sees C + 1 entries, in the memory of the step before."""
    bare = BareStep(tiny_model("llama"), CACHE_SIZE)
    for batch_size in (1, 3):
        bare.reset()
        bare.feed(random_ids(batch_size, num_first))
        layers = bare.cache.layers
        buffers = [x for layer in layers for x in (layer.keys, layer.values)]
        assert {x.shape[:3] for x in buffers} == {(batch_size, 2, CACHE_SIZE + 1)}
        for token in random_ids(batch_size, 5).split(1, dim=1):
            bare.feed(token)
            assert bare.cache.get_seq_length() == CACHE_SIZE
        now = [x for layer in layers for x in (layer.keys, layer.values)]
        assert [x.data_ptr() for x in now] == [x.data_ptr() for x in buffers]


def test_it_is_no_method():
    assert BareStep.name not in METHODS
