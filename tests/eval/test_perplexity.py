"""Perplexity against an independent loop in plain transformers, and the documents the commands
print.
"""

import json
import math

import pandas as pd
import pytest
import torch
from helpers.tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvalign import checkpoints
from kvalign.app.cli import main
from kvalign.data_gen.corpora import texts
from kvalign.eval.statistics import by_quarter, by_segment, interval
from kvalign.methods import make_method
from kvalign.scoring import score

ROW = ["method", "aligner", "cache_size", "num_sinks", "num_evicted", "num_labels"]
ROW += ["nll_nats", "perplexity", "low", "high", "quarters", "segments", "seconds"]


def rotate_back_one(keys, inv_freq):
    """RoPE by -1 with complex numbers, unlike the package's own."""
    half = keys.shape[-1] // 2
    turned = torch.complex(keys[..., :half], keys[..., half:]) * torch.polar(
        torch.ones_like(inv_freq), -inv_freq
    )
    return torch.cat([turned.real, turned.imag], -1)


@torch.no_grad()
def plain_stepping(model, ids, cache_size, num_sinks, rotary):
    """Sinks and window, one eviction a step, by editing a DynamicCache between forward calls."""
    cache, nll = DynamicCache(), []
    logits = model(input_ids=ids[None, : cache_size + 1], past_key_values=cache).logits[0, -1]
    for label in ids[cache_size + 1 :]:
        nll.append(-logits.log_softmax(-1)[label].item())
        for layer in cache.layers:
            for name in ("keys", "values"):
                full = getattr(layer, name)
                kept = full[:, :, num_sinks + 1 :]
                if name == "keys" and rotary:
                    kept = rotate_back_one(kept, model.model.rotary_emb.inv_freq)
                setattr(layer, name, torch.cat([full[:, :, :num_sinks], kept], 2))
        position = torch.tensor([[cache_size]])
        logits = model(
            input_ids=label.view(1, 1), past_key_values=cache, position_ids=position
        ).logits[0, -1]
    return math.exp(sum(nll) / len(nll))


@torch.no_grad()
def plain_recompute(model, ids, cache_size):
    nll = 0.0
    for i in range(cache_size + 1, len(ids)):
        window = ids[None, i - cache_size - 1 : i]
        nll -= model(input_ids=window).logits[0, -1].log_softmax(-1)[ids[i]].item()
    return math.exp(nll / (len(ids) - cache_size - 1))


def run_json(capsys, *argv):
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["gpt2-mini", "llama-mini"])
def test_command_equals_an_independent_loop(name, capsys):
    cache_size, num_tokens = 32, 60
    methods = "window,streaming-llm,recompute"
    found = run_json(
        capsys,
        *f"eval perplexity --model {name} --methods {methods} --cache-sizes {cache_size}".split(),
        *f"--num-tokens {num_tokens} --corpus python-docs".split(),
    )
    assert [list(row) for row in found["rows"]] == [ROW] * 3
    assert found["settings"]["num_tokens"] == num_tokens
    folder = checkpoints.model_path(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = next(texts("python-docs", "test"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text[:20_000], return_tensors="pt").input_ids[0, : cache_size + 1 + num_tokens]
    rotary = name == "llama-mini"
    expected = [
        plain_stepping(model, ids, cache_size, 0, rotary),
        plain_stepping(model, ids, cache_size, 4, rotary),
        plain_recompute(model, ids, cache_size),
    ]
    for row, perplexity in zip(found["rows"], expected, strict=True):
        assert row["num_labels"] == num_tokens
        assert math.isclose(row["perplexity"], perplexity, rel_tol=1e-4), row["method"]


def test_same_labels_at_every_cache_size_start_after_the_first_input(ids):
    model = tiny_model("gpt2")
    for cache_size in (10, 20):
        nll = score(make_method("recompute", model, cache_size=cache_size), ids[:1, :50])
        logits = model(input_ids=ids[:1, : cache_size + 1]).logits[0, -1]
        assert len(nll) == 50 - cache_size - 1
        assert torch.isclose(nll[0], -logits.log_softmax(-1)[ids[0, cache_size + 1]], atol=1e-5)


def test_plots_are_written(capsys, tmp_path):
    for ending, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        path = tmp_path / f"plot{ending}"
        argv = "eval perplexity --methods window,recompute --cache-sizes 16,32 --num-tokens 20"
        assert main([*argv.split(), "--plot", str(path)]) == 0
        assert path.read_bytes().startswith(magic)
    assert "recompute" in path.read_text()
    assert "perplexity" in capsys.readouterr().out


SHORT = [
    "eval",
    "perplexity",
    "--corpus",
    "python-docs",
    "--cache-sizes",
    "16",
    "--num-tokens",
    "40",
]


@pytest.mark.parametrize("name", ["gpt2-mini", "llama-mini"])
def test_stepping_on_request_gives_the_same_figures(capsys, name):
    methods = ["--model", name, "--methods", "window,streaming-llm,kvalign,recompute"]
    fast, slow = (run_json(capsys, *SHORT, *methods, *extra) for extra in ([], ["--stepwise"]))
    for one, other in zip(fast["rows"], slow["rows"], strict=True):
        assert math.isclose(one["perplexity"], other["perplexity"], rel_tol=1e-4)


def test_ratios_are_to_the_reference_of_the_same_sizes(capsys):
    argv = [*SHORT, "--methods", "recompute,window,discard-half", "--num-evicted", "1,half"]
    rows = run_json(capsys, *argv, "--reference", "recompute")["rows"]
    cells = [(row["method"], row["num_evicted"]) for row in rows]
    assert cells == [
        ("recompute", 1),
        ("window", 1),
        ("discard-half", 6),
        ("recompute", 8),
        ("window", 8),
    ]
    perplexity = dict(zip(cells, (row["perplexity"] for row in rows), strict=True))
    for (method, num_evicted), row in zip(cells, rows, strict=True):
        base = perplexity["recompute", num_evicted if method != "discard-half" else 1]
        assert math.isclose(row["ratio"], perplexity[method, num_evicted] / base, rel_tol=1e-6)
    assert rows[0]["drift"] == 1
    assert [s["ratio"] for s in rows[0]["segments"]] == [1, 1]
    first = [row["segments"][0] for row in rows[:2]]
    expected = first[1]["perplexity"] / first[0]["perplexity"]
    assert math.isclose(first[1]["ratio"], expected, rel_tol=1e-6)


def test_kept_cells_are_not_rerun(capsys, tmp_path, monkeypatch):
    keep = ["--methods", "window,recompute", "--keep", str(tmp_path / "cells")]
    first = run_json(capsys, *SHORT, *keep)
    files = sorted((tmp_path / "cells").iterdir())
    assert [path.name.rpartition("-")[0] for path in files] == [
        "recompute-C16-s0-k1",
        "window-C16-s0-k1",
    ]
    table = pd.read_parquet(files[0])
    mean = table["nll_nats"].astype(float).mean()
    assert math.isclose(math.exp(mean), first["rows"][1]["perplexity"])
    monkeypatch.setattr("kvalign.methods.Recompute.score", None)
    monkeypatch.setattr("kvalign.methods.Window.score", None)
    assert run_json(capsys, *SHORT, *keep)["rows"] == first["rows"]
    fewer = run_json(capsys, *SHORT[:-1], "25", *keep)["rows"]
    assert fewer[1]["nll_nats"] == pytest.approx(table["nll_nats"][:25].astype(float).mean())
    files[0].write_bytes(files[0].read_bytes()[:-10])
    assert main([*SHORT, *keep]) == 2
    assert f"{files[0]} is damaged" in capsys.readouterr().err


def test_intervals_hold_the_mean_and_shrink():
    nll = 2 + torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    low, high = interval(nll)
    assert low < math.exp(2) < high and math.isclose(low, interval(nll)[0])
    error = 1.96 / math.sqrt(20_000)  # of the mean of independent draws
    assert math.isclose(math.log(high / low), 2 * error, rel_tol=0.2)
    wide = interval(nll[:2000])
    assert wide[1] - wide[0] > 2 * (high - low)
    assert interval(nll[:150]) == (0, math.inf)


def test_segments_double_in_units_of_the_cache():
    nll = torch.arange(14.0)
    found = by_segment(nll, 2)
    assert [(s["start"], s["end"]) for s in found] == [(0, 1), (1, 2), (2, 4), (4, 7)]
    means = [part.mean().item() for part in nll.split([2, 2, 4, 6])]
    assert [s["perplexity"] for s in found] == pytest.approx([math.exp(m) for m in means])
    ends = {n: [s["end"] for s in by_segment(nll[:n], 2)] for n in (1, 3, 4, 5, 6, 11)}
    assert ends == {1: [0.5], 3: [1, 1.5], 4: [1, 2], 5: [1, 2.5], 6: [1, 2, 3], 11: [1, 2, 5.5]}


def test_quarters_are_perplexities_in_order():
    nll = torch.arange(8.0)
    assert by_quarter(nll) == pytest.approx([math.exp(i + 0.5) for i in (0, 2, 4, 6)])
