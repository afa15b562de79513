"""What a policy keeps, and where rows end whose positions are kept."""

import pytest
import torch
from helpers.methods import make, tables
from helpers.tiny_models import CONTEXT_LEN

import kvalign
from kvalign.policies import OLDEST, POLICIES
from kvalign.streaming.loop import stream_rows
from kvalign.streaming.sampling import Sampling

OTHERS = ("h2o", "keydiff")  # by attention and by keys


def new(models, place, policy, **changes):
    kind, _, way = place.partition(" ")
    changes = dict(policy=policy, warn=False) | changes
    if way == "table":
        changes["aligner"] = tables(models[kind], scale=0.5)
    if way == "keep":
        changes["positions"] = "keep"
    return make("kvalign" if way == "table" else "streaming-llm", models[kind], **changes)


def test_a_row_ends_where_its_positions_do(models):
    """One after the other, as each does alone; the others go on."""
    method = new(models, "gpt2 keep", "h2o")
    prompts = [[5] * 3, [6, 7] * 12, [8]]
    rows = [[] for _ in prompts]
    for row, token in stream_rows(method, prompts, sampling=Sampling(temperature=0)):
        rows[row].append(token)
    for prompt, tokens in zip(prompts, rows, strict=True):
        alone = kvalign.stream_tokens(method, torch.tensor([prompt]))
        assert [int(token) for token in alone] == tokens
        assert len(prompt) + len(tokens) == CONTEXT_LEN + 1


@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in (OLDEST, "second-chance")])
def test_heads_and_layers_differ(policy, models, ids):
    """Of `tova` the layers alone: a layer's heads keep the same. Attention of random weights is so
    even that `second-chance` finds no light entry.
    """
    method = make("streaming-llm", models["llama"], cache_size=16, policy=policy)
    method.feed(ids[:, :100])
    (a, b), (c, d), _ = method.cache.index()
    assert a.tolist() != c.tolist()
    assert (a.tolist() == b.tolist()) == (c.tolist() == d.tolist()) == (policy == "tova")
