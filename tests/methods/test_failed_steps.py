"""A step that fails in the middle, by an exception or Ctrl-C, and is tried again: the stream is
what it would have been, or is refused in one line until it begins anew. Never is it another one.
"""

from contextlib import contextmanager, suppress

import pytest
import torch
from helpers.methods import WAYS, made
from helpers.pairwise import covering
from torch import nn

from kvalign.foundation.errors import UserError
from kvalign.streaming.lookup import read_ahead, take_ahead

WAYS = [
    *WAYS,
    ("streaming-llm", "llama", dict(policy="h2o")),
    ("tables", "gpt2", dict(policy="h2o")),
    ("streaming-llm", "opt", dict(policy="tova", positions="keep")),
    ("streaming-llm", "llama", dict(memory=30)),
    ("tables", "gpt2", dict(memory=30)),
    ("streaming-llm", "qwen2", dict(num_evicted=5)),
]
SEEN = {"the first": (), "filling": (5,), "about full": (21,), "full": (41,)}
FAILURES = {"an exception": RuntimeError, "Ctrl-C": KeyboardInterrupt}
OWN = ("window", "streaming-llm", "kvalign", "tables")
LOOPS = covering(
    [(*way, n, why) for way in WAYS if way[0] in OWN for n in SEEN for why in FAILURES],
    lambda name, kind, sizes, seen, why: (name, str(sizes), seen == "the first"),
    lambda name, kind, sizes, seen, why: (seen, why),
)


@contextmanager
def failing(model, why, after=0):
    """Within it the model's second layer fails, after so many passes that do not."""
    lists = (x for x in model.modules() if isinstance(x, nn.ModuleList))
    layer, left = max(lists, key=len)[1], [after]

    def fail(*args):
        left[0] -= 1
        if left[0] < 0:
            raise FAILURES[why]("planted")

    hook = layer.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def begun(method, ids, lens):
    """Rows that have been fed so many tokens each, and the ids that come next."""
    if lens and method.tokens_left is not None:
        lens = (9,)
    rows = [method.new() for _ in lens]
    for one, row, num in zip(rows, ids, lens, strict=False):
        one.feed(row[None, :num])
    if len(rows) > 1:
        method.join(rows)
    elif rows:
        method = rows[0]
    starts = lens or (0,)
    later = [row[num : num + 12] for row, num in zip(ids, starts, strict=False)]
    return method, torch.stack(later)


def steps(method, ids):
    return [method.feed(ids[:, i : i + 1]) for i in range(ids.shape[1])]


def outcome(call):
    """What it gives; None where it says in one line that the stream cannot go on."""
    try:
        return call()
    except UserError as error:
        if str(error).count("\n") or "reset() it" not in str(error):
            raise
        return None


def check(method, failed_ids, later, expected, ids, as_own=lambda method: method):
    """After a failure: what failed and what comes later is as expected, or nothing is done."""
    found = outcome(lambda: [method.feed(failed_ids), *steps(method, later)])
    if found is None:
        for use in (method.state, lambda: method.select([0]), lambda: method.new().join([method])):
            assert outcome(use) is None
        assert outcome(lambda: method.feed(failed_ids)) is None
    else:
        assert all(map(torch.equal, found, expected))
    alike = as_own(method.new())
    method.reset()
    assert all(map(torch.equal, steps(method, ids[:, :8]), steps(alike, ids[:, :8])))


@pytest.mark.parametrize("change", ["select", "join"])
@pytest.mark.parametrize(
    ("name", "kind", "sizes"),
    [
        ("discard-half", "gpt2", {}),
        ("tables", "gpt2", {}),
        ("kvalign", "llama", {}),
        ("streaming-llm", "llama", dict(memory=30)),
        ("streaming-llm", "llama", dict(policy="tova")),
    ],
)
def test_rows_are_changed_wholly_or_not_at_all(name, kind, sizes, change, models, ids, monkeypatch):
    method, later = begun(made(name, models[kind], **sizes), ids, (7, 30))
    other, _ = begun(method.new(), ids, (9,))
    layer = method.cache.layers[1]
    monkeypatch.setattr(layer, change, lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        getattr(method, change)([1, 0] if change == "select" else [other])
    monkeypatch.undo()
    check(method, later[:, :1], later[:, 1:], [], ids)
    assert outcome(other.state)  # which has only been looked at


@pytest.mark.parametrize(("name", "kind", "sizes", "seen", "why"), LOOPS)
def test_a_loop_of_ones_own_fails(name, kind, sizes, seen, why, models, ids):
    """One that calls the model with a cache, and nothing else."""
    model = models[kind]

    def own(method):
        def feed(ids):
            with torch.no_grad():
                return model(input_ids=ids, past_key_values=method.cache).logits[:, -1].float()

        method.feed = feed
        return method

    method, later = begun(made(name, model, **sizes), ids, SEEN[seen])
    expected = steps(own(method), later)
    method, later = begun(made(name, model, **sizes), ids, SEEN[seen])
    own(method)
    with failing(model, why), pytest.raises(FAILURES[why]):
        method.feed(later[:, :1])
    check(method, later[:, :1], later[:, 1:], expected, ids, own)


@pytest.mark.parametrize("num_read", [0, 2])
def test_reading_ahead_fails(num_read, models, ids):
    """What had been read before counts as its tokens come."""
    model = models["llama"]

    def stepped(fails):
        method, later = begun(made("streaming-llm", model), ids[:1], (30,))
        logits = [read_ahead(method, later[:, :4])]
        logits += [take_ahead(method.cache, int(later[0, 1 + i])) for i in range(num_read)]
        if fails:
            with failing(model, "Ctrl-C"), suppress(KeyboardInterrupt):
                read_ahead(method, later[:, 1 + num_read : 5])
            assert take_ahead(method.cache, int(later[0, 1 + num_read])) is None
        return method, later[:, 1 + num_read :]

    method, later = stepped(fails=False)
    expected = steps(method, later)
    method, later = stepped(fails=True)
    check(method, later[:, :1], later[:, 1:], expected, ids[:1])
