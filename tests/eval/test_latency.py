"""Latency rows: every method and kind in one run, ratios of medians, shapes without weights."""

import json

import pytest

from kvalign.cli import main
from kvalign.eval import shapes

SHORT = [
    "eval",
    "latency",
    "--num-trials",
    "2",
    "--trial-len",
    "3",
    "--cache-sizes",
    "12,20",
    "--json",
]


def test_every_kind_is_timed_beside_the_reference(capsys):
    kinds = ["--aligner-kinds", "table,network,anchored"]
    assert main([*SHORT, *kinds, "--methods", "streaming-llm,kvalign,recompute"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    names = ["streaming-llm", "table", "network", "anchored", "recompute"]
    assert [row["aligner"] or row["method"] for row in rows] == names * 2
    assert [row["cache_size"] for row in rows] == [12] * 5 + [20] * 5
    for row in rows:
        base = rows[0] if row["cache_size"] == 12 else rows[5]
        assert row["ratio"] == pytest.approx(row["median_ms"] / base["median_ms"])
        assert 0 < row["median_ms"] <= row["p90_ms"] <= row["p99_ms"]
        assert row["num_steps"] == 6


def test_batches_are_timed_per_token(capsys):
    assert main([*SHORT, "--batch-size", "3", "--num-evicted", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["batch_size"] for row in rows} == {3}
    assert {row["num_evicted"] for row in rows if row["method"] == "kvalign"} == {2}


def test_shapes_are_those_of_the_models(monkeypatch):
    """Parameters in all as their authors give them, tied embeddings counted once."""
    counts = {"distilgpt2": 81_912_576, "gpt2": 124_439_808, "smollm2-135m": 134_515_008}
    for name in shapes.SHAPES:
        model = shapes.build(name, dtype="bfloat16")
        assert sum(x.numel() for x in model.parameters()) == counts[name]
