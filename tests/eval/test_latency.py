"""Latency rows: every method and kind in one run, what is on the clock, shapes without weights."""

import json
from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvalign.app.cli import main
from kvalign.data_gen.prompts import conversations
from kvalign.eval import latency_models
from kvalign.methods.base import Cached
from kvalign.models import LoadedModel, load_model

SHORT = ["eval", "latency", "--num-trials", "2", "--trial-len", "3", "--json"]
TWO_SIZES = ["--cache-sizes", "12,20"]
COLUMNS = ["method", "aligner", "cache_size", "num_sinks", "num_evicted", "batch_size", "num_steps"]
COLUMNS += ["ttft_ms", "median_ms", "mean_ms", "p90_ms", "p99_ms", "ratio", "peak_mb"]


@pytest.fixture
def run(capsys):
    """Run the command with more flags; its document."""

    def run(*flags):
        assert main([*SHORT, *flags]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def calls(monkeypatch):
    """Every call of `feed` of a cached method, as (name, ids, entries stored before), in order."""
    found, feed = [], Cached.feed

    def recording(self, ids):
        found.append((self.name, ids, self.cache.get_seq_length()))
        return feed(self, ids)

    monkeypatch.setattr(Cached, "feed", recording)
    return found


def test_every_kind_is_timed_beside_the_reference(run):
    kinds = ["--aligner-kinds", "table,network,anchored"]
    rows = run(*TWO_SIZES, *kinds, "--methods", "streaming-llm,kvalign,recompute")["rows"]
    names = ["streaming-llm", "table", "network", "anchored", "recompute"]
    assert [row["aligner"] or row["method"] for row in rows] == names * 2
    assert [row["cache_size"] for row in rows] == [12] * 5 + [20] * 5
    for row in rows:
        base = rows[0] if row["cache_size"] == 12 else rows[5]
        assert list(row) == COLUMNS
        assert row["ratio"] == pytest.approx(row["median_ms"] / base["median_ms"])
        assert 0 < row["median_ms"] <= row["p90_ms"] <= row["p99_ms"]
        assert row["num_steps"] == 6
        assert row["ttft_ms"] > 0
        assert row["peak_mb"] > 0


def test_batches_are_groups_of_their_own(run, calls):
    flags = ["--batch-sizes", "1,3", "--num-evicted", "2", "--methods", "streaming-llm,kvalign"]
    rows = run(*TWO_SIZES, *flags, "--aligner-kinds", "table")["rows"]
    assert [(row["cache_size"], row["batch_size"]) for row in rows] == [
        (cache_size, batch_size) for cache_size in (12, 20) for batch_size in (1, 3) for _ in "sk"
    ]
    assert {row["num_evicted"] for row in rows} == {2}
    for base, row in zip(rows[::2], rows[1::2], strict=True):
        assert base["ratio"] == 1
        assert row["ratio"] == pytest.approx(row["median_ms"] / base["median_ms"])
        assert row["peak_mb"] > base["peak_mb"], "what is placed is beside what is kept"
    for one, three in zip(rows[:2], rows[2:4], strict=True):
        assert three["peak_mb"] > 2 * one["peak_mb"]
    assert [size for size, _ in groupby(len(ids) for _, ids, _ in calls)] == [1, 3, 1, 3]


def test_figures_are_those_of_the_clock(run, monkeypatch):
    """On a clock that `feed` and `reset` alone move: a prompt costs its tokens, the k-th single
    token of a stream k squared, a reset much.
    """
    clock = SimpleNamespace(now=0.0)
    feed, reset = Cached.feed, Cached.reset

    def slow_feed(self, ids):
        self.num_single = self.num_single + 1 if ids.shape[1] == 1 else 0
        clock.now += self.num_single**2 if self.num_single else ids.numel()
        return feed(self, ids)

    def slow_reset(self):
        clock.now += 1e6
        reset(self)

    monkeypatch.setattr(Cached, "feed", slow_feed)
    monkeypatch.setattr(Cached, "reset", slow_reset)
    time = SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr("kvalign.eval.timing.time", time)
    flags = ["--cache-sizes", "12", "--batch-sizes", "2", "--num-trials", "3", "--trial-len", "4"]
    rows = run(*flags, "--methods", "window,streaming-llm")["rows"]
    tokenizer = load_model("gpt2-mini").tokenizer
    prompts = [len(tokenizer(turns[0])["input_ids"]) for turns in conversations("own")]
    steps = np.arange(4, 16) ** 2 / 2 * 1e3  # three to warm up, twelve on the clock, two streams
    expected = {
        "ttft_ms": 2e3 * sorted(prompts[:3])[1],
        "median_ms": np.median(steps),
        "mean_ms": steps.mean(),
        "p90_ms": np.quantile(steps, 0.9),
        "p99_ms": np.quantile(steps, 0.99),
        "ratio": 1,
    }
    for row in rows:
        assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_first_tokens_follow_the_prompts_in_turn(run, calls, tmp_path):
    texts = ["The island was", "It is a long story, and", "Bread"]
    rows = [{"turns": [text, "More?"]} for text in texts[:2]] + [{"prompt": texts[2]}]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--prompts", f"{tmp_path}/some.jsonl", "--methods", "window,streaming-llm"]
    run(*flags, "--batch-sizes", "2", "--num-trials", "4", "--cache-sizes", "12")
    tokenizer = load_model("gpt2-mini").tokenizer
    expected = [tokenizer(texts[i])["input_ids"] for i in (0, 0, 1, 2, 0)]  # the first to warm up
    for name in ("window", "streaming-llm"):
        fed, stored = zip(*[call[1:] for call in calls if call[0] == name], strict=True)
        assert [ids.tolist() for ids in fed[:5]] == [[ids, ids] for ids in expected]
        filling = [(2, 13), *[(2, 1)] * 3]
        shapes_fed = [tuple(ids.shape) for ids in fed[5:]]
        assert shapes_fed == [*filling, *[(2, 1)] * 12, *filling]  # the last for memory
        assert list(stored) == [0] * 6 + [12] * 15 + [0] + [12] * 3


def test_models_without_a_tokenizer_take_random_prompts(run, calls, monkeypatch):
    tiny = dict(model_type="gpt2", n_layer=1, n_head=1, n_embd=8, vocab_size=50)
    monkeypatch.setitem(latency_models.SHAPES, "tiny", tiny)
    flags = ["--cache-sizes", "12", "--methods", "streaming-llm", "--prompts", "missing.jsonl"]
    run("--model", "shape:tiny", "--prompt-len", "9", *flags)
    assert [tuple(ids.shape) for _, ids, _ in calls[:4]] == [(1, 9)] * 3 + [(1, 13)]
    assert len(calls[0][1].unique()) > 1


def test_prompts_without_a_token_are_random_and_said(run, calls, monkeypatch, caplog):
    def load(*args):
        loaded = load_model(*args)
        return LoadedModel(loaded.model, lambda text, **_: {"input_ids": []}, loaded.spec)

    monkeypatch.setattr("kvalign.eval.grid.load_model", load)
    run("--cache-sizes", "12", "--methods", "streaming-llm", "--prompt-len", "5")
    assert calls[0][1].shape == (1, 5)
    assert "no token in prompt 'The island was first" in caplog.text


def test_trained_aligners_take_the_place_of_untrained(run):
    names = [f"kvalign-gpt2-mini-{kind}" for kind in ("table-kl", "network")]
    rows = run("--aligner", ",".join(names), "--methods", "streaming-llm,kvalign")["rows"]
    assert [row["aligner"] for row in rows] == [None, "table-kl", "network"]
    assert [row["num_sinks"] for row in rows] == [4, 0, 4]


def test_aligners_of_both_sorts_are_refused(capsys):
    both = ["--aligner", "kvalign-gpt2-mini-table", "--aligner-kinds", "table"]
    assert main([*SHORT, *both]) == 2
    assert "give --aligner (trained) or --aligner-kinds (untrained), not" in capsys.readouterr().err


def test_missing_prompts_are_said_before_the_model_is_loaded(capsys):
    assert main([*SHORT, "--prompts", "missing.jsonl", "--model", "none"]) == 2
    assert "no prompts at 'missing.jsonl'" in capsys.readouterr().err


@pytest.mark.parametrize("kinds", ["table", "tables"])
def test_threads_are_as_before_afterwards(kinds, capsys):
    before = torch.get_num_threads()
    flags = ["--num-threads", str(before + 1), "--cache-sizes", "12", "--aligner-kinds", kinds]
    flags += ["--methods", "streaming-llm,kvalign", "--num-trials", "1"]
    is_done = main([*SHORT, *flags]) == 0
    assert is_done == (kinds == "table")
    assert torch.get_num_threads() == before
    if is_done:
        environment = json.loads(capsys.readouterr().out)["environment"]
        assert environment["threads"] == before + 1


def test_peaks_hold_the_cache_and_are_the_same_again(run):
    flags = ["--cache-sizes", "200", "--methods", "streaming-llm,recompute"]
    rows = run(*flags)["rows"]
    spec = load_model("gpt2-mini").spec
    entries = 2 * spec.num_layers * spec.num_kv_heads * 201  # float32 vectors
    assert rows[0]["peak_mb"] > entries * spec.head_dim * 4 / 1e6
    assert [row["peak_mb"] for row in run(*flags)["rows"]] == [row["peak_mb"] for row in rows]


def test_defaults_on_a_device_that_tells_no_peak(capsys, monkeypatch):
    monkeypatch.setattr("kvalign.eval.timing.peak_bytes", lambda device, work: None)
    assert main([*SHORT, "--cache-sizes", "12"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["peak_mb"] for row in rows} == {None}
    assert [row["aligner"] for row in rows if row["method"] == "kvalign"] == ["table", "network"]
    assert main([*SHORT[:-1], "--cache-sizes", "12"]) == 0
    out = capsys.readouterr().out
    assert "ms/token" in out and "peak MB" not in out, "a column without a figure is left out"


def test_shapes_are_those_of_the_models():
    """Parameters in all as their authors give them, tied embeddings counted once."""
    counts = {"distilgpt2": 81_912_576, "gpt2": 124_439_808, "smollm2-135m": 134_515_008}
    for name in latency_models.SHAPES:
        model = latency_models.random_model(name, dtype="bfloat16")
        assert sum(x.numel() for x in model.parameters()) == counts[name]
