"""A press of kvpress evicts what our policy of the same score does."""

import pytest
import torch
from helpers.tiny_models import tiny_model

from kvalign.methods import make_method
from kvalign.policies import POLICIES
from kvalign.policies.base import Policy

kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed")


@pytest.mark.parametrize(
    ("press", "ours"),
    [("KnormPress", "key-norm"), ("KeyDiffPress", "keydiff"), ("TOVAPress", "tova")],
)
def test_presses_evict_as_ours(monkeypatch, press, ours):
    class Pressed(Policy):
        name, reads_weights = press, ours == "tova"

        def score(self, seen):
            scores = getattr(kvpress, press)().score
            return scores(None, None, seen.keys, seen.values, seen.weights, {}).float()

    monkeypatch.setitem(POLICIES, "pressed", Pressed)
    ids = torch.randint(64, (2, 60), generator=torch.Generator().manual_seed(5))
    sizes, model = dict(cache_size=10, num_sinks=2, num_recent=3), tiny_model("llama")
    pressed, own = (
        make_method("streaming-llm", model, policy=policy, **sizes) for policy in ("pressed", ours)
    )
    for method in (pressed, own):
        for i in range(60):
            method.feed(ids[:, i : i + 1])
    for row in (0, 1):
        same = pressed.cache.index(row) == own.cache.index(row)
        assert same.all() or (ours == "key-norm" and same.float().mean() > 0.8)  # to 11 bits
