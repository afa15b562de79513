"""A press of kvpress evicts what our policy of the same score does; rows do not see each other."""

import pytest
import torch
from helpers.tiny_models import tiny_model

from kvalign.foundation.errors import UserError
from kvalign.methods import make_method
from kvalign.policies import POLICIES
from kvalign.policies.base import policy_of

SIZES = dict(cache_size=10, num_sinks=2, num_recent=3)


class Spread:
    """A press for places without kvpress: entries unlike the mean of all stay."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return (keys - keys.mean(2, keepdim=True)).norm(dim=-1)


class Hidden:
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return hidden_states.mean(-1)


class Short:
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys.mean(-1)[..., 1:]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def fed(model, policy, ids, **sizes):
    """A method with tokens [B, T] fed one by one."""
    method = make_method("streaming-llm", model, policy=policy, **SIZES | sizes)
    for i in range(ids.shape[1]):
        method.feed(ids[:, i : i + 1])
    return method


def ids_of(num_rows, length):
    return torch.randint(64, (num_rows, length), generator=torch.Generator().manual_seed(5))


def test_rows_are_what_they_are_alone(model, monkeypatch):
    monkeypatch.setitem(POLICIES, "pressed", policy_of(Spread()))
    ids = ids_of(2, 40)
    lens = (25, 6)  # the second is not full when they join
    alone = [fed(model, "pressed", ids[i : i + 1, :n]) for i, n in enumerate(lens)]
    together = alone[0].new()
    together.join([fed(model, "pressed", ids[i : i + 1, :n]) for i, n in enumerate(lens)])
    for t in range(14):
        step = torch.stack([ids[i, n + t] for i, n in enumerate(lens)])[:, None]
        logits = together.feed(step)
        for i, one in enumerate(alone):
            torch.testing.assert_close(logits[i], one.feed(step[i : i + 1])[0], atol=1e-4, rtol=0)
            assert torch.equal(together.cache.index(i), one.cache.index())
    heads = alone[0].cache.index().flatten(0, 1)
    assert len(heads.unique(dim=0)) > 1 and not torch.equal(heads[0, 2:], torch.arange(31, 39))


@pytest.mark.parametrize(
    ("press", "expected"),
    [
        (Hidden(), "Hidden cannot be a policy: it does not score by keys and values alone"),
        (Short(), "Short cannot be a policy: its scores are (1, 2, 63)"),
        (object(), "object cannot be a policy"),
    ],
)
def test_presses_that_need_more_are_refused_in_one_line(press, expected):
    with pytest.raises(UserError) as error:
        policy_of(press)
    assert str(error.value).startswith(expected) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "reads_weights", "ours"),
    [
        ("KnormPress", False, "key-norm"),
        ("KeyDiffPress", False, "keydiff"),
        ("TOVAPress", True, "tova"),
    ],
)
def test_presses_evict_as_ours(model, monkeypatch, name, reads_weights, ours):
    kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed")
    policy = policy_of(getattr(kvpress, name)(), reads_weights=reads_weights)
    monkeypatch.setitem(POLICIES, "pressed", policy)
    ids = ids_of(2, 60)
    pressed, own = (fed(model, policy, ids) for policy in ("pressed", ours))
    for row in (0, 1):
        same = pressed.cache.index(row) == own.cache.index(row)
        assert same.all() or (ours == "key-norm" and same.float().mean() > 0.8)  # to 11 bits
