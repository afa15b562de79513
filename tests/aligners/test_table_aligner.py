"""Position tables: placed from birth, so nothing adds up."""

from copy import deepcopy

import pytest
import torch
from helpers.methods import CACHE_SIZE, make, step, tables
from helpers.tiny_models import CONTEXT_LEN

from kvalign.foundation.errors import UserError
from kvalign.streaming.pieces import encode


def test_a_table_says_how_many_sinks_and_takes_any(models):
    table = tables(models["gpt2"], num_sinks=4)
    for asked, kept in ((None, 4), (2, 2), (0, 0)):
        assert (
            make("kvalign", models["gpt2"], num_sinks=asked, aligner=table).sizes.num_sinks == kept
        )


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neo"])
def test_long_inputs_stay_within_the_tables(kind, models, ids):
    """Born at positions that the tables know: one by one if none is to spare."""
    aligner = tables(models[kind], scale=0.2, chunk_len=CACHE_SIZE + 1)
    whole, single = (make("kvalign", models[kind], aligner=aligner) for _ in range(2))
    expected = step(single, ids[:, :90], CACHE_SIZE + 1)[-1]
    assert torch.allclose(whole.feed(ids[:, :90]), expected, atol=1e-4)
    if kind != "gpt_neo":  # placed on read: an input counts as its tokens one by one
        return
    roomy = tables(models[kind], scale=0.2, chunk_len=CACHE_SIZE + 4)
    method, births = make("kvalign", models[kind], aligner=roomy), []
    anchor = roomy.anchor
    roomy.anchor = lambda *args: births.append(args[2]) or anchor(*args)
    assert torch.isfinite(method.feed(ids[:, :90])).all()
    ends = [b.stop if isinstance(b, slice) else int(b.max()) + 1 for b in births]
    assert max(ends) == CACHE_SIZE + 4


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gpt2", dict(memory=40, num_recalled=4)),
        ("opt", dict(policy="h2o", num_evicted=2)),
    ],
)
def test_squeezed_places_are_those_of_a_model_that_counts_so(kind, sizes, models, ids):
    """Whose embeddings, and tables, lie by places, from the first token on where each entry is
    placed by itself; rows that join differ in length.
    """
    model, last = models[kind], CACHE_SIZE - 5
    table, other, by_place = tables(model, 0.5), deepcopy(model), tables(model, 0.5)
    table.config = table.config.model_copy(update={"positions": ((CACHE_SIZE, last),)})
    positions = (torch.arange(CONTEXT_LEN) * last / CACHE_SIZE).round().long()
    weight = next(
        x.weight.data for name, x in other.named_modules() if name.endswith(("wpe", "positions"))
    )
    weight[-CONTEXT_LEN:] = weight[-CONTEXT_LEN:][positions]
    for x in by_place.parameters():
        x.data = x.data[:, :, positions]
    both = [
        make("kvalign", one, aligner=aligner, **sizes)
        for one, aligner in ((model, table), (other, by_place))
    ]
    found, expected = (step(method, ids[:, :70], 9) for method in both)
    assert torch.allclose(found, expected, atol=1e-4)
    again = both[0].new()
    again.restore(both[0].state())
    assert torch.equal(again.feed(ids[:, 70:71]), both[0].feed(ids[:, 70:71]))
    for method in both:
        shorter = method.new()
        method.reset()
        method.feed(ids[:1, :50])
        shorter.feed(ids[:1, :7])
        method.join([shorter])
    found, expected = (torch.cat([x.feed(t) for t in ids[:, :30].split(1, 1)]) for x in both)
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("by", [9, -5])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gpt2", {}),
        ("opt", dict(num_sinks=0)),
        ("gpt_neo", dict(num_evicted=3)),
        ("gpt2", dict(cache_dtype="int8", realign_every=3)),
        ("gpt2", dict(num_evicted="half")),
    ],
)
def test_the_window_is_lifted_or_squeezed_at_the_first_eviction(kind, sizes, by, models, ids):
    """From then on it is as if the model counted so, and the tables."""
    model, at = models[kind], CACHE_SIZE + by
    table, other, by_place = tables(model, 0.5), deepcopy(model), tables(model, 0.5)
    table.config = table.config.model_copy(update={"positions": ((CACHE_SIZE, at),)})
    both = [
        make("kvalign", one, aligner=aligner, **sizes)
        for one, aligner in ((model, table), (other, by_place))
    ]
    before = [method.feed(ids[:, : CACHE_SIZE + 1]) for method in both]
    torch.testing.assert_close(*before)
    positions = torch.arange(CONTEXT_LEN)
    if by < 0:
        positions = (positions * at / CACHE_SIZE).round().long()
    else:
        positions = (positions + by * (positions >= both[0].sizes.num_sinks)).clamp_max(63)
    weight = next(
        x.weight.data for name, x in other.named_modules() if name.endswith(("wpe", "positions"))
    )
    weight[-CONTEXT_LEN:] = weight[-CONTEXT_LEN:][positions]
    for x in by_place.parameters():
        x.data = x.data[:, :, positions]
    rest = ids[:, CACHE_SIZE + 1 : 100].split(1, 1)
    found, expected = (torch.stack([method.feed(x) for x in rest]) for method in both)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    if both[0].is_exact:  # a long input is read in segments
        torch.testing.assert_close(
            both[0].new().feed(ids[:, :100]), expected[-1], atol=1e-4, rtol=1e-4
        )
    alone = [both[0].new(), both[0].new()]
    for method, num in zip(alone, (90, 7), strict=True):
        method.feed(ids[:1, :num])
    rows = both[0].new()
    rows.restore(alone[0].state())
    shorter = both[0].new()
    shorter.restore(alone[1].state())
    rows.join([shorter])
    for x in ids[:1, :60].split(1, 1):  # the second row evicts on the way
        expected = torch.cat([method.feed(x) for method in alone])
        torch.testing.assert_close(rows.feed(x.expand(2, 1)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("by", [9, -5])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_loop_of_ones_own_is_told_the_model_s_position(by, attention, models, ids):
    model = deepcopy(models["gpt2"])
    model.set_attn_implementation(attention)
    table = tables(model, 0.5)
    table.config = table.config.model_copy(update={"positions": ((CACHE_SIZE, CACHE_SIZE + by),)})
    method = make("kvalign", model, aligner=table)
    cache = method.new().cache
    expected, found = step(method, ids[:, :60], 9), []
    with torch.no_grad():
        for some in (ids[:, :9], *ids[:, 9:60].split(1, 1)):
            found.append(model(some, past_key_values=cache, use_cache=True).logits[:, -1])
    torch.testing.assert_close(torch.stack(found), expected, atol=1e-4, rtol=1e-4)


def test_what_a_squeezed_cache_cannot_have_right_is_refused(models, ids):
    table = tables(models["gpt2"], 0.5)
    table.config = table.config.model_copy(update={"positions": ((CACHE_SIZE, CACHE_SIZE - 5),)})
    method = make("kvalign", models["gpt2"], aligner=table)
    method.feed(ids[:, :50])
    with pytest.raises(UserError, match="squeezes positions"):
        method.edit(30, 32, encode(method.model, None, [5, 6], after=[4]).part(method.model, 2))
    method = make("kvalign", models["gpt2"], aligner=table, memory=40, num_recalled=4)
    with pytest.raises(UserError, match="squeezes positions from the first token on"):
        method.model(ids[:, :5], past_key_values=method.cache)


@pytest.mark.parametrize("change", ["data", "in place"])
def test_a_table_that_was_changed_is_read_as_it_is_now(change, models, ids):
    """Whichever of the four, however it was changed."""
    table = tables(models["gpt2"], 0.5)
    method = make("kvalign", models["gpt2"], aligner=table)
    method.feed(ids[:, :30])
    if change == "data":
        table.value.data = table.value + 1
    else:
        table.value.add_(1)
    fresh = make("kvalign", models["gpt2"], aligner=table)
    fresh.restore(method.state())
    torch.testing.assert_close(method.feed(ids[:, 30:31]), fresh.feed(ids[:, 30:31]))


@pytest.mark.parametrize(
    ("cache_size", "position"),
    [(8, 8), (12, 12), (16, 24), (19, 24), (25, 25), (31, 31), (45, 45), (56, 50), (60, 50)],
)
def test_other_sizes_take_the_position_of_the_nearest(cache_size, position, models):
    """Lifted or squeezed as that is, and their own if that has its own."""
    positions = ((8, 8), (16, 24), (32, 32), (60, 50))
    config = tables(models["gpt2"]).config.model_copy(update={"positions": positions})
    assert config.position_at(cache_size) == position
    empty = config.model_copy(update={"positions": ()})
    assert empty.position_at(cache_size) == cache_size
