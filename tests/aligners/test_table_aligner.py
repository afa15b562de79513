"""Position tables: placed from birth, so nothing adds up; and the network on top of them."""

import pytest
import torch
from helpers.methods import CACHE_SIZE, anchored, make, step, tables


def test_zero_tables_are_streaming_llm(model, ids):
    stale = step(make("streaming-llm", model), ids[:, :90], CACHE_SIZE + 1)
    zero = make("kvalign", model, aligner=tables(model), num_sinks=4)
    moved = step(zero, ids[:, :90], CACHE_SIZE + 1)
    assert torch.allclose(stale, moved, atol=1e-4)


def test_a_table_says_how_many_sinks_and_takes_any(models):
    table = tables(models["gpt2"], num_sinks=4)
    for asked, kept in ((None, 4), (2, 2), (0, 0)):
        assert (
            make("kvalign", models["gpt2"], num_sinks=asked, aligner=table).sizes.num_sinks == kept
        )


def test_untrained_anchored_network_is_its_table(model, ids):
    table = tables(model, scale=0.5)
    aligner = anchored(model, scale=0.5)
    one = step(make("kvalign", model, aligner=table), ids[:, :90], CACHE_SIZE + 1)
    method = make("kvalign", model, aligner=aligner)
    assert torch.allclose(step(method, ids[:, :90], CACHE_SIZE + 1), one, atol=1e-4)
    torch.nn.init.normal_(aligner.key.fc3.weight)
    assert not torch.allclose(step(method, ids[:, :90], CACHE_SIZE + 1), one, atol=1e-3)


@pytest.mark.parametrize("make_aligner", [tables, anchored])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_long_inputs_stay_within_the_tables(kind, make_aligner, models, ids):
    """What a full cache is fed is born at positions the tables know: one by one if none is to
    spare.
    """
    aligner = make_aligner(models[kind], scale=0.2, chunk_len=CACHE_SIZE + 1)
    whole, single = (make("kvalign", models[kind], aligner=aligner) for _ in range(2))
    expected = step(single, ids[:, :90], CACHE_SIZE + 1)[-1]
    assert torch.allclose(whole.feed(ids[:, :90]), expected, atol=1e-4)
    if make_aligner is tables:  # placed on read: an input counts as its tokens one by one
        return
    roomy = make_aligner(models[kind], scale=0.2, chunk_len=CACHE_SIZE + 4)
    method, births = make("kvalign", models[kind], aligner=roomy), []
    anchor = roomy.anchor
    roomy.anchor = lambda *args: births.append(args[2]) or anchor(*args)
    assert torch.isfinite(method.feed(ids[:, :90])).all()
    ends = [b.stop if isinstance(b, slice) else int(b.max()) + 1 for b in births]
    assert max(ends) == CACHE_SIZE + 4
