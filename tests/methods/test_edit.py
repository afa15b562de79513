"""Edits of a stream: what is refused, what was evicted before, and what an edit leaves as it was.
Their figures are those of plain loops in `test_numerics_fuzz.py`; `kvalign verify` takes them back.
"""

import copy

import pytest
import torch
from helpers.methods import made, make

from kvalign.foundation.errors import UserError
from kvalign.streaming.pieces import encode

GONE = ("1.memory.0", "1.memory.1", "1.base")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[x], other[x]) for x in one)


def test_layers_that_took_nothing_back_stored_nothing_before(models, ids):
    """Their streams go on, and are not edited."""
    one = make("streaming-llm", models["llama"], memory=40, recall_layers="0")
    one.feed(ids[:, :50])
    other = one.new()
    other.restore({x: y for x, y in one.state().items() if x not in GONE})
    assert torch.equal(one.feed(ids[:, 50:51]), other.feed(ids[:, 50:51]))
    with pytest.raises(UserError, match="stored nothing of the others"):
        other.edit(45, 47)
    one.edit(45, 47)


def test_what_had_been_evicted_is_counted(models, ids):
    method = make("streaming-llm", models["llama"])
    method.feed(ids[:, :50])
    oldest = int(method.cache.index()[4])
    assert method.edit(10, oldest + 3) == oldest - 10
    assert method.num_tokens == 50 - (oldest + 3 - 10)
    assert method.cache.index().tolist() == [0, 1, 2, 3, *range(10, method.num_tokens)]
    method.undo_edit()
    before = method.feed(ids[:, 50:51])
    # What lies before the oldest entry is gone, and what takes its place would be.
    other = make("streaming-llm", models["llama"])
    other.feed(ids[:, :50])
    assert other.edit(10, 20, ids[:, :3]) == 10 and other.num_tokens == 43
    assert torch.allclose(other.feed(ids[:, 50:51]), before, atol=1e-4)


def test_a_failed_edit_leaves_the_stream_as_it_was(models, ids, monkeypatch):
    method = make("streaming-llm", models["llama"])
    method.feed(ids[:, :50])
    before = method.state()

    def fail(ids):
        raise KeyboardInterrupt

    monkeypatch.setattr(method, "feed", fail)
    with pytest.raises(KeyboardInterrupt):
        method.edit(44, 46, ids[:, :3])
    assert same(method.state(), before)


def test_what_cannot_be_edited_is_refused_by_name(models, ids):
    def refusal(method, start=6, stop=8, *new, rows=slice(None)):
        method.feed(ids[rows, :30])
        before = method.state() if method.name != "dense" else {}
        with pytest.raises(UserError) as refused:
            method.edit(start, stop, *new)
        assert method.name == "dense" or same(method.state(), before)
        return str(refused.value)

    llama = models["llama"]
    for name in ("recompute", "discard-half", "dense"):
        assert f"streams of {name} cannot be edited" in refusal(make(name, llama))
    assert "policy tova" in refusal(make("streaming-llm", llama, policy="tova"))
    assert "kind network" in refusal(make("kvalign", models["gpt2"]))
    streaming = make("streaming-llm", llama)
    assert "behind the 4 sinks" in refusal(streaming, 3, 8)
    for start, stop in ((-1, 4), (5, 3), (29, 31)):
        assert "has 30" in refusal(streaming.new(), start, stop)
    assert "below 96" in refusal(streaming.new(), 6, 8, torch.full((2, 1), 96))
    assert "2 rows" in refusal(streaming.new(), 6, 8, ids[:1, :3])
    uneven = uneven_rows("streaming-llm", llama, ids)[0]
    with pytest.raises(UserError, match="of each row, the shortest of which has 30"):
        uneven.edit(29, 31)
    with pytest.raises(UserError, match="leave each row a token, got all of row 1"):
        uneven_rows("window", llama, ids, (9, 5))[0].edit(0, 5)


def uneven_rows(name, model, ids, nums=(30, 60, 30, 75), **options):
    """A batch of rows of so many tokens, the third of them edited before, and each row alone."""
    alone = []
    for row, num in enumerate(nums):
        alone.append(made(name, model, **options))
        alone[-1].feed(ids[row % 2 :][:1, row : row + num])
        if row == 2:
            alone[-1].edit(20, 22, ids[:1, :2])
    batch = copy.deepcopy(alone[0])
    batch.join([copy.deepcopy(x) for x in alone[1:]])
    return batch, alone


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("options", [{}, {"memory": 30}, {"cache_dtype": "int8"}], ids=str)
def test_rows_of_unequal_length_are_edited_each_in_its_own_tokens(kind, options, models, ids):
    """Full caches, too, whose entries lie alike."""
    if kind == "bloom" and "memory" in options:
        return  # it has none
    name = "tables" if kind == "gpt2" else "streaming-llm"
    batch, alone = uneven_rows(name, models[kind], ids, **options)
    new, piece = ids[:1, 5:8].repeat(4, 1) + torch.arange(4)[:, None], ids[:1, :4]
    part = encode(models[kind], None, piece[0].tolist(), after=[7]).part
    own = [x.edit(22, 27, row[None], part(x.model)) for x, row in zip(alone, new, strict=True)]
    assert batch.edit(22, 27, new, part(batch.model, 4)) == max(own)
    assert batch.cache.num_tokens == [x.num_tokens for x in alone]
    most = 1e-3 if "cache_dtype" in options else 1e-4  # a last digit may be another level of 8 bits
    for i in range(20):
        now = ids[:1, i : i + 1]
        apart = batch.feed(now.expand(4, 1)) - torch.cat([x.feed(now) for x in alone])
        assert apart.abs().max() < most, i
