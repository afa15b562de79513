"""What a policy keeps, and where rows end whose positions are kept."""

import pytest
from helpers.methods import make, tables
from helpers.tiny_models import CONTEXT_LEN

import kvalign
from kvalign.policies import OLDEST, POLICIES

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
    of_model = models["gpt2"], kvalign.load_model("gpt2-mini").tokenizer
    how = dict(method="streaming-llm", cache_size=16, policy="h2o", positions="keep", temperature=0)
    prompts = [[5] * 3, [6, 7] * 12, [8]]
    texts = ["" for _ in prompts]
    for row, piece in kvalign.stream_batch(*of_model, prompts, **how):
        texts[row] += piece
    for prompt, text in zip(prompts, texts, strict=True):
        alone = kvalign.stream(*of_model, **how)
        alone.feed(prompt)
        assert "".join(alone) == text and text
        assert len(alone.ids) == CONTEXT_LEN + 1


@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in (OLDEST, "second-chance")])
def test_heads_and_layers_differ(policy, models, ids):
    """Of `tova` the layers alone: a layer's heads keep the same. Attention of random weights is so
    even that `second-chance` finds no light entry.
    """
    method = make("streaming-llm", models["llama"], cache_size=16, policy=policy)
    method.feed(ids[:, :100])
    (a, b), (c, d) = method.cache.index()
    assert a.tolist() != c.tolist()
    assert (a.tolist() == b.tolist()) == (c.tolist() == d.tolist()) == (policy == "tova")
