"""Frontier: which rows are on it, and what its times are of."""

import json
from types import SimpleNamespace

import pytest
import torch

from kvalign.app.cli.main import main
from kvalign.eval.evaluations.frontier import EVALUATION, judge
from kvalign.eval.evaluations.latency import timing
from kvalign.methods.as_encoded import DiscardHalf, Recompute
from kvalign.methods.cached import StreamingLLM

CASES = {  # by name: sinks, ms, nats, and whether it is on the frontier
    "fastest": (0, 1.0, 5.0, "yes"),
    "as fast, worse": (0, 1.0, 5.1, ""),
    "slower, better": (0, 2.0, 4.0, "yes"),
    "slower, hardly better": (0, 3.0, 3.999, "perhaps"),
    "slowest, worse": (0, 4.0, 4.5, ""),
    "other sinks": (4, 9.0, 9.0, "yes"),
}


def test_what_no_other_beats_in_both_is_on_the_frontier():
    noise = torch.Generator().manual_seed(0)
    rows = [{"num_sinks": sinks} for sinks, *_ in CASES.values()]
    losses = [0.1 * torch.randn(400, generator=noise) for _ in CASES]
    nats = [nats for _, _, nats, _ in CASES.values()]
    losses = [x - x.mean() + mean for x, mean in zip(losses, nats, strict=True)]
    busy = (1.0, 3.0, 1.2, 1.0)  # all turns of a moment take longer
    turns = [[[1e-3 * ms * much] * 2 for much in busy] for _, ms, *_ in CASES.values()]
    judge(rows, losses, turns)
    assert [row["frontier"] for row in rows] == [there for *_, there in CASES.values()]
    assert rows[0]["mean_ms"] == pytest.approx(1.55) and rows[0]["median_ms"] == pytest.approx(1.0)
    of_worst = (losses[4] - losses[3]).mean().exp().item()
    assert rows[4]["ratio"] == pytest.approx(of_worst) and "ratio" not in rows[5]
    assert rows[2]["slowest_ms"] == pytest.approx(2 * 1.1)  # of the median turn, not of the slowest


@pytest.fixture
def run(capsys, monkeypatch):
    """The document of the command, on a clock that moves by the tokens that a step encodes."""
    clock = SimpleNamespace(thread_time=lambda: clock.now, now=0.0)
    monkeypatch.setattr(timing, "time", clock)
    for cls in (DiscardHalf, Recompute, StreamingLLM):

        def slow(self, ids, feed=cls.feed):
            full = isinstance(self, DiscardHalf) and self.fill == self.sizes.cache_size
            left = self.sizes.first_input_len - self.sizes.num_evicted
            step = left if full else self.fill if isinstance(self, Recompute) else 1
            clock.now += step
            return feed(self, ids)

        monkeypatch.setattr(cls, "feed", slow)

    def document(*flags):
        argv = ["eval", "frontier", "--cache-sizes", "24", "--num-tokens", "40", "--json"]
        assert main([*argv, "--num-trials", "2", "--trial-len", "1", *flags]) == 0
        return json.loads(capsys.readouterr().out)

    return document


@pytest.mark.slow
def test_refills_count_as_often_as_they_come(run, capsys):
    methods = "dense,streaming-llm,discard-half,recompute"
    found = run("--methods", methods, "--num-sinks", "0")
    rows = {(row["method"], row["num_evicted"]): row for row in found["rows"]}
    assert [n for name, n in rows if name == "discard-half"] == [12, 8, 6, 3]  # by their times
    for (name, num), row in rows.items():
        if name == "discard-half":
            assert row["mean_ms"] == pytest.approx(1e3 * (25 - num + num - 1) / num)
            assert row["slowest_ms"] == pytest.approx(1e3 * (25 - num))
    assert rows["dense", 1]["mean_ms"] is None and EVALUATION.figure(found)
    argv = "eval perplexity --cache-sizes 24 --num-tokens 40 --num-sinks 0 --json --methods"
    assert main([*argv.split(), methods]) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        one = rows[row["method"], row["num_evicted"]]
        assert one["perplexity"] == row["perplexity"]
        of_base = rows["recompute", 1]["perplexity"]
        assert one["by_reference"] == pytest.approx(row["perplexity"] / of_base)


def test_without_its_usual_reference_the_first_method_is_the_reference(run):
    found = run("--methods", "streaming-llm,discard-half", "--num-sinks", "4")
    assert found["settings"]["reference"] == "streaming-llm"
    at_once = [row["num_evicted"] for row in found["rows"] if row["method"] == "discard-half"]
    assert sorted(at_once) == [2, 5, 8, 10]
