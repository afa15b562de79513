"""Perplexity against an independent loop in plain transformers, the documents that the commands
print, and recall slices, counted by hand.
"""

import json
import math

import pyarrow.parquet as pq
import pytest
import torch
from helpers.other_weights import change, copy_of
from helpers.plain_stream import PlainStream, PlainWindow, Plan
from helpers.tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvalign.eval
from kvalign import checkpoints
from kvalign.app.cli.main import main
from kvalign.data_gen.corpora import texts
from kvalign.eval.evaluations.perplexity import SLICES, slice_figure, slice_name
from kvalign.eval.evaluations.perplexity.scores import (
    Distances,
    compare,
    distances,
    of_losses,
    slices,
)
from kvalign.eval.protocol.data import SIZES
from kvalign.foundation.statistics import by_part, by_segment, interval
from kvalign.methods import make_method
from kvalign.models.architectures import spec_of
from kvalign.models.loading import LoadedModel
from kvalign.streaming.scoring import score

ROW = [*SIZES, "first_label", "nll_nats", "num_labels", "perplexity", "low", "high", "tenths"]
ROW += ["segments", "bigrams", "tokens", "seconds"]


def plain_perplexity(loop, model, plan, ids):
    """Of the labels after C + 1 tokens, by a loop over a plain model."""
    stream, nll = loop(model, plan, {}), []
    logits = stream.take(ids[: plan.cache_size + 1])
    for label in ids[plan.cache_size + 1 :]:
        nll.append(-logits.log_softmax(-1)[label].item())
        logits = stream.take(label[None])
    return math.exp(sum(nll) / len(nll))


def run_json(capsys, *argv):
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_command_equals_an_independent_loop(capsys):
    name, cache_size, num_tokens = "gpt2-mini", 32, 20
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
    model.requires_grad_(False)
    text = next(texts("python-docs", "test"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text[:20_000], return_tensors="pt").input_ids[0, : cache_size + 1 + num_tokens]
    expected = [
        plain_perplexity(loop, model, Plan(name, cache_size, num_sinks), ids)
        for loop, num_sinks in ((PlainStream, 0), (PlainStream, 4), (PlainWindow, 4))
    ]
    for row, perplexity in zip(found["rows"], expected, strict=True):
        assert row["num_labels"] == num_tokens
        assert math.isclose(row["perplexity"], perplexity, rel_tol=1e-4), row["method"]


TWO = ["eval", "perplexity", "--methods", "window,recompute", "--num-tokens", "12", "--cache-sizes"]


@pytest.mark.slow
def test_all_cache_sizes_have_the_labels_of_the_largest(loaded, capsys):
    both = run_json(capsys, *TWO, "8,20")["rows"]
    assert [row["first_label"] for row in both] == [21] * 4
    text = next(texts("python-docs", "test"))
    ids = loaded.tokenizer(text[:2000], return_tensors="pt").input_ids[:, : 21 + 12]
    for row in both:
        method = make_method(row["method"], loaded.model, cache_size=row["cache_size"], num_sinks=0)
        nll = score(method, ids)[-12:]
        assert row["nll_nats"] == pytest.approx(nll.double().mean().item())
    for name in ("bigrams", "tokens"):  # of the same labels, so as many are new
        assert len({row[name][-1]["num_labels"] for row in both}) == 1
    joined = [
        row
        for size in ("8", "20")
        for row in run_json(capsys, *TWO, size, "--first-label", "21")["rows"]
    ]
    assert [row | {"seconds": 0} for row in joined] == [row | {"seconds": 0} for row in both]
    own = run_json(capsys, *TWO, "8,20", "--protocol", "paper")["rows"]
    assert [row["first_label"] for row in own] == [9, 9, 21, 21]
    assert own[1]["nll_nats"] != both[1]["nll_nats"] and own[3]["nll_nats"] == both[3]["nll_nats"]


SHORT = "eval perplexity --corpus python-docs --cache-sizes 16 --num-tokens 25"


@pytest.mark.slow
def test_ratios_are_to_the_reference_of_the_same_sizes(capsys):
    argv = [*SHORT.split(), "--methods", "recompute,window,discard-half", "--num-evicted", "1,half"]
    argv += ["--protocol", "paper"]
    rows = run_json(capsys, *argv, "--reference", "recompute")["rows"]
    sizes = [(row["method"], row["num_evicted"]) for row in rows]
    names = ("recompute", "window", "discard-half")
    numbers = {"discard-half": 6}  # half less two sinks, that it has by default
    assert sizes == [(name, 1) for name in names] + [(x, numbers.get(x, 8)) for x in names]
    perplexity = dict(zip(sizes, (row["perplexity"] for row in rows), strict=True))
    for (method, num_evicted), row in zip(sizes, rows, strict=True):
        base = perplexity["recompute", 1 if num_evicted == 6 else num_evicted]
        assert math.isclose(row["ratio"], perplexity[method, num_evicted] / base, rel_tol=1e-6)
    assert rows[0]["drift"] == 1
    assert [s["ratio"] for s in rows[0]["segments"]] == [1, 1]
    first = [row["segments"][0] for row in rows[:2]]
    expected = first[1]["perplexity"] / first[0]["perplexity"]
    assert math.isclose(first[1]["ratio"], expected, rel_tol=1e-6)


@pytest.mark.slow
def test_kept_losses_are_not_computed_again(capsys, tmp_path, monkeypatch, caplog):
    keep = ["--methods", "window,recompute", "--keep", str(tmp_path / "losses")]
    first = run_json(capsys, *SHORT.split(), *keep)
    files = sorted((tmp_path / "losses").iterdir())
    names = [path.name.rpartition("-")[0] for path in files]
    assert names == ["recompute-C16-s0-k1", "window-C16-s0-k1"]
    kept = pq.read_table(files[0])["nll_nats"].to_numpy().astype(float)
    assert math.isclose(math.exp(kept.mean()), first["rows"][1]["perplexity"])
    with monkeypatch.context() as unasked:
        unasked.setattr("kvalign.eval.evaluations.perplexity.scores.score", None)
        assert run_json(capsys, *SHORT.split(), *keep)["rows"] == first["rows"]
    fewer = run_json(capsys, *SHORT.split()[:-1], "15", *keep)["rows"]
    assert fewer[1]["nll_nats"] == pytest.approx(kept[:15].mean())
    files[0].write_bytes(files[0].read_bytes()[:-10])
    assert main([*SHORT.split(), *keep]) == 0
    assert f"{files[0]} is damaged: it is measured again" in caplog.text
    capsys.readouterr()


@pytest.mark.slow
def test_kept_losses_are_those_of_the_same_weights_and_config(capsys, tmp_path):
    """Other weights with the same embedding were given the losses of the first ones."""
    folder = copy_of("llama-mini", tmp_path / "model")
    argv = [*SHORT.split(), "--model", str(folder), "--methods", "streaming-llm"]
    keep = ["--keep", str(tmp_path / "losses")]
    found = [run_json(capsys, *argv, *keep)["rows"][0]["nll_nats"]]
    change(folder)
    found.append(run_json(capsys, *argv, *keep)["rows"][0]["nll_nats"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    found.append(run_json(capsys, *argv, *keep)["rows"][0]["nll_nats"])
    assert len({*found}) == 3
    assert found[2] == run_json(capsys, *argv)["rows"][0]["nll_nats"]


@pytest.mark.slow
def test_guessing_among_the_vocabulary_is_hinted_at(loaded, caplog):
    """A perplexity that says the text is the wrong one, and no other."""
    how = dict(cache_sizes=32, num_tokens=200)
    methods = ("window", "kvalign")  # `window` fails on any text
    kvalign.eval.perplexity(**how, methods=methods, loaded=loaded)
    assert not caplog.messages
    model = tiny_model("gpt2", vocab_size=8192)
    random_one = LoadedModel(model, loaded.tokenizer, spec_of(model.config, "tiny"))
    kvalign.eval.perplexity(**how, methods="window", loaded=random_one)
    (hint,) = caplog.messages
    assert "about that of guessing among 8192 tokens: corpus 'python-docs'" in hint


PHI = 0.9  # of the correlated losses: each is this much of the one before, and a draw


def correlated(num_streams, num_labels, seed=0):
    """Losses [num_streams, num_labels] around 2 whose neighbours are alike, as a text's are: an
    autoregressive process. The mean of N has the standard error 1 / ((1 - PHI) * sqrt(N)); of
    independent losses with the same spread it would be 4.4 times smaller.
    """
    draws = torch.randn(
        num_streams, num_labels + 200, generator=torch.Generator().manual_seed(seed)
    )
    losses = [draws[:, 0]]
    for draw in draws[:, 1:].T:
        losses.append(PHI * losses[-1] + draw)
    return 2 + torch.stack(losses[200:], 1)


def test_intervals_are_as_wide_as_correlated_losses_need():
    """Widths as the process has them, on average of ten streams."""
    nll = correlated(10, 20_000)
    widths = [math.log(high / low) for low, high in map(interval, nll)]
    error = 1 / ((1 - PHI) * math.sqrt(20_000))
    assert math.isclose(sum(widths) / 10, 2 * 1.96 * error, rel_tol=0.1)
    quarter = [math.log(high / low) for low, high in map(interval, nll[:, :5000])]
    assert math.isclose(sum(quarter), 2 * sum(widths), rel_tol=0.15)
    assert interval(nll[0]) == interval(nll[0])
    assert interval(nll[0, :150]) == (0, None)


def test_comparisons_are_paired_by_label():
    """The text's ups and downs, the same for both, are in the perplexities alone."""
    ups = correlated(1, 4000)[0] + torch.arange(4).repeat_interleave(1000)
    worse = torch.tensor([0.1, 0.2, 0.3, 0.4]).repeat_interleave(1000)
    losses = [ups, ups + worse]
    rows = [
        dict(method=name, cache_size=1000, num_sinks=0, num_evicted=1, first_label=1001)
        | dict(segments=by_segment(nll, 1000))
        | dict(tenths=[{"perplexity": one} for one in by_part(nll, 10)])
        for name, nll in zip(("recompute", "window"), losses, strict=True)
    ]
    compare(rows, losses, "recompute")
    reference, row = rows
    for name in ("ratio", "ratio_low", "ratio_high", "drift"):
        assert reference[name] == 1
    assert row["ratio"] == pytest.approx(math.exp(0.25))
    assert row["drift"] == pytest.approx(math.exp(0.4 - 0.1))
    assert row["ratio_low"] < row["ratio"] < row["ratio_high"] < row["ratio_low"] * 1.1
    ratios = [segment["ratio"] for segment in row["segments"]]
    assert ratios == pytest.approx([math.exp(x) for x in (0.1, 0.2, 0.35)])
    ratios = [tenth["ratio"] for tenth in row["tenths"]]
    parts = (0.1, 0.1, 0.15, 0.2, 0.2, 0.3, 0.3, 0.35, 0.4, 0.4)
    assert ratios == pytest.approx([math.exp(x) for x in parts])


def test_segments_begin_with_the_first_label():
    nll = torch.arange(9.0)
    found = by_segment(nll, 2, num_before=5)
    assert [(s["start"], s["end"]) for s in found] == [(2.5, 4), (4, 7)]
    means = [part.mean().item() for part in nll.split([3, 6])]
    assert [s["perplexity"] for s in found] == pytest.approx([math.exp(m) for m in means])
    starts = {n: by_segment(nll, 2, n)[0] for n in (0, 1, 2, 6, 7, 40)}
    ends = {n: (one["start"], one["end"]) for n, one in starts.items()}
    assert ends == {
        **{0: (0, 1), 1: (0.5, 1), 2: (1, 2), 6: (3, 4)},
        **{7: (3.5, 8), 40: (20, 24.5)},  # the rest of a segment that joins the next
    }


def sliced(rows, losses, ids, reference):
    """Rows with their figures, and the comparison with the reference."""
    far = {x: Distances(distances(ids, kind.length), kind.edges) for x, kind in SLICES.items()}
    for row, nll in zip(rows, losses, strict=True):
        row |= of_losses(nll, row["cache_size"], row["first_label"], far)
    compare(rows, losses, reference, far)


EDGES = SLICES["bigrams"].edges


def test_distances_are_to_the_last_token_of_the_same_bigram():
    #       0  1  2  3  4  5  6  7  8  9
    text = [5, 6, 7, 5, 6, 6, 6, 5, 6, 7]
    #  "5 6" ends at 1, 4, 8; "6 7" at 2, 9; "6 6" at 5, 6; "7 5" and "6 5" once
    assert distances(text, 2).tolist() == [0, 0, 0, 0, 3, 0, 1, 0, 4, 7]
    assert distances([3], 2).tolist() == [0] and distances([], 2).tolist() == []
    assert distances(text, 1).tolist() == [0, 0, 0, 3, 3, 1, 1, 4, 2, 7]


def test_slices_end_with_parts_of_the_cache():
    far = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 0])
    nll = torch.arange(13.0)
    found = slices(nll, far, 8, EDGES)
    ends = [(0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0), (1.0, 2.0), (2.0, None)]
    assert [(one["from"], one["to"]) for one in found] == [*ends, (None, None)]
    labels = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11], [0, 12]]
    assert [one["num_labels"] for one in found] == [*map(len, labels)]
    means = [math.exp(sum(of) / len(of)) for of in labels]
    assert [one["perplexity"] for one in found] == pytest.approx(means)
    assert all(one["high"] is None for one in found)
    names = ["0-0.25 C", "0.25-0.5 C", "0.5-0.75 C", "0.75-1 C", "1-2 C", "over 2 C", "new"]
    assert [*map(slice_name, found)] == names


def test_ratios_are_paired():
    """`window` beside `recompute` at C = 8, on a text that repeats each 8 tokens, or never."""
    ids = [*range(9), *(n % 8 if n < 500 else 100 + n for n in range(1, 1001))]
    losses = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    worse = torch.where(distances(ids, 2)[9:] == 8, 0.5, 0.1)
    rows = [
        dict(method=name, aligner=None, cache_size=8, num_sinks=0, num_evicted=1, first_label=9)
        for name in ("recompute", "window")
    ]
    sliced(rows, [losses, losses + worse], ids, "recompute")
    old, new = rows[1]["bigrams"][3], rows[1]["bigrams"][-1]
    assert old["num_labels"] == 496 and new["num_labels"] == 503  # and one, 2 C back
    ratios = [old[name] for name in ("ratio", "ratio_low", "ratio_high")]
    assert ratios == pytest.approx([math.exp(0.5)] * 3)
    assert new["ratio"] == pytest.approx(math.exp(0.1))
    assert all(one.get("ratio") in (1.0, None) for one in rows[0]["bigrams"])


def test_a_memory_is_told_by_what_was_last_said_beyond_the_cache():
    """Of one method, with a memory and without: the reference is the one without."""
    ids = [*range(40)] * 30  # each token was last said 40 tokens ago, 5 C
    losses = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    size = dict(
        method="kvalign", aligner=None, cache_size=8, num_sinks=0, num_evicted=1, first_label=9
    )
    rows = [size | dict(memory=memory, num_recalled=2) for memory in (0, 500)]
    sliced(rows, [losses, losses - 0.1], ids, "kvalign")
    for row in rows:
        counts = [(x["from"], x["to"], x["num_labels"]) for x in row["tokens"]]
        assert counts == [(0, 1, 0), (1, 4, 0), (4, 16, 969), (16, None, 0), (None, None, 31)]
    found = rows[1]["tokens"][2]
    ratios = [found[name] for name in ("ratio", "ratio_low", "ratio_high")]
    assert ratios == pytest.approx([math.exp(-0.1)] * 3)
    document = {"rows": rows, "settings": {"model": "tiny", "reference": "kvalign"}}
    (axes,) = slice_figure(document, "tokens")[0].axes
    line = axes.containers[0].lines[0]
    assert [*line.get_ydata()] == pytest.approx([math.exp(-0.1)] * 2)
