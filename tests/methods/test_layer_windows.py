"""Layers that see a window of their own, shorter than the cache, keep to it: in rows of unequal
lengths and with tables.
"""

import pytest
import torch
from helpers.methods import CACHE_SIZE, make, step, tables
from helpers.tiny_models import tiny_model

WINDOW = 8


@pytest.fixture(scope="module")
def model():
    return tiny_model("mistral", sliding_window=WINDOW)


def test_rows_of_unequal_lengths_are_what_each_is_alone(model, ids):
    rows, alone = make("streaming-llm", model), make("streaming-llm", model)
    rows.feed(ids[:1, :30])
    for method in (short := make("streaming-llm", model)), alone:
        method.feed(ids[1:, :11])
    rows.join([short])
    for i in range(40, 70):
        found, expected = rows.feed(ids[:, i : i + 1])[1:], alone.feed(ids[1:, i : i + 1])
        assert torch.allclose(found, expected, atol=1e-4)


def test_tables_that_change_nothing_are_streaming_llm(model, ids):
    first = CACHE_SIZE + 1
    plain = step(make("streaming-llm", model), ids[:, :80], first)
    aligned = step(make("kvalign", model, aligner=tables(model)), ids[:, :80], first)
    assert torch.allclose(aligned, plain, atol=1e-4)
