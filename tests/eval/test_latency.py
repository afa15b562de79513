"""Latency rows: every method and kind in one run, what is on the clock, shapes without weights.

The clock of most tests is moved by the model alone, a second a token, so a row's figures are
equalities.
"""

import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.methods import CACHE_SIZE
from helpers.tiny_models import KINDS
from transformers import GPT2LMHeadModel

from kvalign.app.cli.main import main
from kvalign.data_gen.corpus import conversations
from kvalign.eval.evaluations.latency import EVALUATION, subjects
from kvalign.eval.evaluations.latency.subjects import BareStep
from kvalign.eval.evaluations.latency.timing import clocked, peak_bytes
from kvalign.eval.protocol.data import SIZES
from kvalign.methods.cached import Cached

SHORT = ["eval", "latency", "--num-trials", "2", "--trial-len", "3", "--json"]
TINY = dict(model_type="gpt2", n_layer=1, n_head=1, n_embd=8, vocab_size=50)
COLUMNS = [*SIZES, "batch_size", "num_steps"]
COLUMNS += ["mean_ms", "median_ms", "p90_ms", "p99_ms", "max_ms", "slowest_ms", "ratio"]
COLUMNS += ["bare_mean_ratio", "bare_ratio", "tokens_per_s", "ttft_ms", "peak_mb"]


@pytest.fixture
def run(capsys):
    """Run the command with more flags; its document."""

    def run(*flags):
        assert main([*SHORT, *flags]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def run_tiny(run, monkeypatch):
    """The same with a model of one small layer, for what no weight changes."""
    monkeypatch.setitem(subjects.SHAPES, "tiny", TINY)
    return functools.partial(run, "--model", "shape:tiny")


@pytest.fixture
def clock(monkeypatch):
    """A clock that the model alone moves: a second for each token that it is given."""
    clock, forward = SimpleNamespace(now=0.0), GPT2LMHeadModel.forward

    def slow_forward(self, input_ids, **keywords):
        clock.now += input_ids.numel()
        return forward(self, input_ids=input_ids, **keywords)

    monkeypatch.setattr(GPT2LMHeadModel, "forward", slow_forward)
    time = SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr("kvalign.eval.evaluations.latency.timing.time", time)
    return clock


def test_figures_are_those_of_the_clock(run, loaded, monkeypatch):
    """On a clock that `feed` and `reset` alone move: a prompt costs its tokens, the k-th single
    token of a stream k squared, a reset much.
    """
    clock = SimpleNamespace(now=0.0)

    def slow_down(cls):
        feed, reset = cls.feed, cls.reset

        def slow_feed(self, ids):
            self.num_single = self.num_single + 1 if ids.shape[1] == 1 else 0
            clock.now += self.num_single**2 if self.num_single else ids.numel()
            return feed(self, ids)

        def slow_reset(self):
            clock.now += 1e6
            reset(self)

        monkeypatch.setattr(cls, "feed", slow_feed)
        monkeypatch.setattr(cls, "reset", slow_reset)

    slow_down(Cached)
    slow_down(BareStep)
    time = SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr("kvalign.eval.evaluations.latency.timing.time", time)
    monkeypatch.setattr("kvalign.eval.evaluations.latency.timing._peak_mb", lambda *about: 1.0)
    flags = ["--cache-sizes", "12", "--batch-sizes", "2", "--num-trials", "3", "--trial-len", "4"]
    rows = run(*flags, "--methods", "window,streaming-llm")["rows"]
    prompts = [len(loaded.tokenizer(turns[0])["input_ids"]) for turns in conversations("own")]
    steps = np.arange(4, 16) ** 2 / 2 * 1e3  # three to warm up, twelve on the clock, two streams
    expected = {f"p{part}_ms": np.quantile(steps, part / 100) for part in (90, 99)}
    expected |= dict(ttft_ms=2e3 * sorted(prompts[:3])[1], tokens_per_s=1e3 / steps.mean())
    expected |= dict(median_ms=np.median(steps), mean_ms=steps.mean(), max_ms=steps[-1])
    expected |= dict(slowest_ms=np.median(steps[3::4]))
    expected |= dict(ratio=1, bare_mean_ratio=1, bare_ratio=1)
    for row in rows:
        assert list(row) == COLUMNS
        assert {name: row[name] for name in expected} == pytest.approx(expected)


@pytest.mark.slow
def test_whole_periods_are_timed(run_tiny, clock):
    """A refill of discard-half is in the figures as often as in a stream: once a period P it reads
    the C + 2 - P tokens that stay. A period that no number of turns divides is rounded up to.
    """
    flags = ["--batch-sizes", "2", "--num-trials", "3", "--trial-len", "5", "--cache-sizes", "45"]
    rows = run_tiny(*flags, "--methods", "streaming-llm,discard-half,recompute")["rows"]
    period = (45 - 4) // 2
    refill = 45 + 2 - period
    half = np.array([refill] + [1] * (period - 1))
    steps = {"bare": np.ones(15), "streaming-llm": np.ones(15), "discard-half": half}
    steps["recompute"] = np.full(15, 46)
    for row in rows:
        seconds = steps[row["method"]]
        mean, median = seconds.mean(), np.median(seconds)
        expected = dict(mean_ms=1e3 * mean, median_ms=1e3 * median, max_ms=1e3 * seconds.max())
        expected |= dict(ratio=mean, bare_mean_ratio=mean, bare_ratio=median)
        expected |= dict(num_steps=len(seconds), tokens_per_s=1 / mean)
        assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_a_step_with_a_memory_is_compared_with_one_without(run, monkeypatch):
    monkeypatch.setattr("kvalign.eval.evaluations.latency.timing._peak_mb", lambda *about: 1.0)
    flags = "--model llama-mini --methods streaming-llm --cache-sizes 32 --memory 0,200"
    *_, none, some = run(*flags.split())["rows"]
    assert none["memory_ratio"] == 1 and some["recall_places"] == "age"
    assert some["memory_ratio"] == some["mean_ms"] / none["mean_ms"]
    of_entry = none["cache_mb"] / 33  # C + 1 slots
    assert some["cache_mb"] == pytest.approx(none["cache_mb"] + 200 * some["stored_bytes"] / 1e6)
    assert some["stored_ratio"] == pytest.approx(some["stored_bytes"] / 1e6 / of_entry)


def test_generating_is_a_prompt_and_its_tokens(run, clock, monkeypatch):
    """Each trial: the prompt up to the first token, then so many more while the cache fills up."""
    monkeypatch.setitem(subjects.SHAPES, "tiny", TINY)
    flags = ["--model", "shape:tiny", "--prompt-len", "5", "--cache-sizes", "12"]
    flags += ["--generate", "30", "--batch-sizes", "2", "--trial-len", "7"]
    rows = run(*flags, "--methods", "streaming-llm,discard-half,recompute")["rows"]
    seen = 5 + np.arange(1, 31)  # by the end of a step
    steps = {"bare": np.ones(30), "streaming-llm": np.ones(30), "recompute": np.minimum(seen, 13)}
    steps["discard-half"] = np.where((seen >= 14) & (seen % 4 == 2), 10, 1)
    for row in rows:
        seconds = np.tile(steps[row["method"]], 2)
        mean, median = seconds.mean(), np.median(seconds)
        expected = dict(mean_ms=1e3 * mean, median_ms=1e3 * median, max_ms=1e3 * seconds.max())
        expected |= dict(num_steps=60, ttft_ms=1e3 * 2 * 5, bare_mean_ratio=mean)
        expected |= dict(p99_ms=1e3 * np.quantile(seconds, 0.99))
        assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_the_floor_is_marked_as_one_and_no_time_is_the_best_without_an_interval(run_tiny):
    document = run_tiny("--cache-sizes", "12", "--methods", "streaming-llm,recompute")
    _, fast, slow = document["rows"]
    slow |= {name: 2 * x for name, x in fast.items() if name.endswith(("_ms", "ratio"))}
    (table,) = EVALUATION.tables(document)
    assert table.rows[0][0].text == "bare step (floor)"
    assert not any(entry.is_best for row in table.rows for entry in row)


def test_a_method_that_ends_before_the_trials_is_said(capsys):
    assert main([*SHORT, "--generate", "600", "--methods", "dense"]) == 2
    assert "dense ends after 512 tokens: leave it out of" in capsys.readouterr().err


def test_memory_that_is_held_at_once_counts():
    def allocate(num_mb):
        return torch.empty(num_mb * 10**6 // 4)  # 4 bytes an element

    def one_after_the_other():
        allocate(40)
        allocate(40)

    def at_once():
        first = allocate(40)
        second = allocate(20)
        del first
        return second, allocate(30)

    before = allocate(80)
    for work, num_mb in ((one_after_the_other, 40), (at_once, 60), (lambda: None, 0)):
        assert peak_bytes(torch.device("cpu"), work) == pytest.approx(num_mb * 10**6, rel=0.01)
    del before


@pytest.mark.parametrize("kind", KINDS)
def test_a_bare_step_is_a_pass_over_the_same_entries(kind, models, ids):
    """Each token takes the last place: what a plain pass gives after the first C and that one."""
    model, ids = models[kind], ids[:, : CACHE_SIZE + 4]
    bare = BareStep(model, CACHE_SIZE)
    first = bare.feed(ids[:, : CACHE_SIZE + 1])
    plain = model(input_ids=ids[:, : CACHE_SIZE + 1]).logits[:, -1]
    torch.testing.assert_close(first, plain, rtol=1e-4, atol=1e-4)
    for token in ids[:, CACHE_SIZE + 1 :].split(1, dim=1):
        seen = torch.cat([ids[:, :CACHE_SIZE], token], 1)
        plain = model(input_ids=seen).logits[:, -1]
        torch.testing.assert_close(bare.feed(token), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_a_clock_waits_before_and_after(kind, monkeypatch):
    done, device = [], torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "synchronize", done.append)
    assert clocked(device, done.append, "work") >= 0
    assert done == [device, "work", device]
