"""Training on facts and questions: the answers alone are trained and judged."""

import pytest
import torch

from kvalign.cache.sizes import CacheSizes
from kvalign.data_gen.facts import ANSWER, NUM_VALUES, QUESTION, FactStreams
from kvalign.foundation.errors import UserError
from kvalign.models.loading import load_model
from kvalign.training.table_objectives import stream_loss
from kvalign.training.text import Text

CACHE_SIZE = 30
RECALL = Text([], [], is_recall=True)


@pytest.fixture(scope="module")
def rows():
    return torch.from_numpy(FactStreams(0, 3, CACHE_SIZE).take(90))


def test_answers_are_those_of_facts_in_the_cache(rows):
    counted = RECALL.counted(rows, CACHE_SIZE).view(3, -1)
    for ids, found in zip(rows, counted, strict=True):
        labels = ids[CACHE_SIZE + 1 :]
        assert found.any() and not found.all() and (labels[found] >= ANSWER).all()
        for i in (found.nonzero()[:, 0] + CACHE_SIZE + 1).tolist():
            cache, key = ids[i - 1 - CACHE_SIZE : i - 1], ids[i - 1] - QUESTION
            facts = cache[(cache < QUESTION) & (cache // NUM_VALUES == key)]
            assert facts[-1] % NUM_VALUES == ids[i] - ANSWER
    with pytest.raises(UserError, match="no question about facts in a cache of 30"):
        RECALL.counted(torch.zeros(2, 60, dtype=torch.int64), CACHE_SIZE)


@pytest.mark.parametrize("objective", ["nll", "kl"])
def test_tables_are_tuned_by_answers(rows, objective):
    """No other token's logits have a gradient."""
    model, sizes = load_model("recall-gpt2").model, CacheSizes(CACHE_SIZE, 0)
    logits = model(rows[:, CACHE_SIZE:-1]).logits.detach().requires_grad_()
    rng = torch.Generator().manual_seed(0)
    counted = RECALL.counted(rows, CACHE_SIZE)
    stream_loss(objective, model, sizes, rows, logits, rng, counted).backward()
    trained = logits.grad.abs().sum(-1).flatten() > 0
    assert trained.sum() > 10 and counted[trained].all()
