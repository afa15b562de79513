"""The bare step: a pass over C + 1 entries, of which one is overwritten where it lies."""

import pytest
import torch
from helpers.tiny_models import KINDS, VOCAB, tiny_model

from kvalign.eval.evaluations.latency.subjects import BareStep

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
