"""Edits of a stream: what is refused, what was evicted before, and what an edit leaves as it was.
Their figures are those of plain loops in `test_numerics_fuzz.py`; `kvalign verify` takes them back.
"""

import pytest
import torch
from helpers.methods import make

from kvalign.foundation.errors import UserError

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
    one, other = streaming.new(), streaming.new()
    one.feed(ids[:1, :9])
    other.feed(ids[1:, :12])
    one.join([other])
    with pytest.raises(UserError, match="select one"):
        one.edit(5, 6)
