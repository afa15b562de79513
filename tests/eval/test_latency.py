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
from helpers.methods import tables
from transformers import AutoConfig, AutoModelForCausalLM, GPT2LMHeadModel

from kvalign.app.cli.main import main
from kvalign.data_gen.prompts import conversations
from kvalign.eval.evaluations.latency import EVALUATION
from kvalign.eval.evaluations.latency import models as latency_models
from kvalign.eval.evaluations.latency.bare_step import BareStep
from kvalign.eval.evaluations.latency.limit import read_bytes
from kvalign.eval.evaluations.latency.timing import memory_of
from kvalign.eval.protocol.evaluation import SIZES
from kvalign.methods import make_method
from kvalign.methods.cached import Cached
from kvalign.models import kernel
from kvalign.models.architectures import spec_of
from kvalign.models.loading import load_model

SHORT = ["eval", "latency", "--num-trials", "2", "--trial-len", "3", "--json"]
TWO_SIZES = ["--cache-sizes", "12,20"]
TINY = dict(model_type="gpt2", n_layer=1, n_head=1, n_embd=8, vocab_size=50)
COLUMNS = [*SIZES, "batch_size", "num_steps"]
COLUMNS += ["mean_ms", "median_ms", "p90_ms", "p99_ms", "max_ms", "ratio"]
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
    monkeypatch.setitem(latency_models.SHAPES, "tiny", TINY)
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


@pytest.fixture
def calls(monkeypatch):
    """Every call of `feed` of a cached method, as (name, ids, entries stored before), in order."""
    found, feed = [], Cached.feed

    def recording(self, ids):
        found.append((self.name, ids, self.cache.get_seq_length()))
        return feed(self, ids)

    monkeypatch.setattr(Cached, "feed", recording)
    return found


def test_figures_are_those_of_the_clock(run, monkeypatch):
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
        "max_ms": steps[-1],
        "tokens_per_s": 1e3 / steps.mean(),
        "ratio": 1,
        "bare_mean_ratio": 1,
        "bare_ratio": 1,
    }
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
        expected = {
            "num_steps": len(seconds),
            "mean_ms": 1e3 * seconds.mean(),
            "median_ms": 1e3 * np.median(seconds),
            "max_ms": 1e3 * seconds.max(),
            "ratio": seconds.mean(),
            "bare_mean_ratio": seconds.mean(),
            "bare_ratio": np.median(seconds),
            "tokens_per_s": 1 / seconds.mean(),
        }
        assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_generating_is_a_prompt_and_its_tokens(run, clock, monkeypatch):
    """Each trial: the prompt up to the first token, then so many more while the cache fills up."""
    monkeypatch.setitem(latency_models.SHAPES, "tiny", TINY)
    flags = ["--model", "shape:tiny", "--prompt-len", "5", "--cache-sizes", "12"]
    flags += ["--generate", "30", "--batch-sizes", "2", "--trial-len", "7"]
    rows = run(*flags, "--methods", "streaming-llm,discard-half,recompute")["rows"]
    seen = 5 + np.arange(1, 31)  # by the end of a step
    steps = {"bare": np.ones(30), "streaming-llm": np.ones(30), "recompute": np.minimum(seen, 13)}
    steps["discard-half"] = np.where((seen >= 14) & (seen % 4 == 2), 10, 1)
    for row in rows:
        seconds = np.tile(steps[row["method"]], 2)
        expected = {
            "num_steps": 60,
            "ttft_ms": 1e3 * 2 * 5,
            "mean_ms": 1e3 * seconds.mean(),
            "median_ms": 1e3 * np.median(seconds),
            "p99_ms": 1e3 * np.quantile(seconds, 0.99),
            "max_ms": 1e3 * seconds.max(),
            "bare_mean_ratio": seconds.mean(),
        }
        assert {name: row[name] for name in expected} == pytest.approx(expected)


@pytest.mark.slow
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


def test_the_floor_is_marked_as_one_and_no_time_is_the_best_without_an_interval(run_tiny):
    document = run_tiny("--cache-sizes", "12", "--methods", "streaming-llm,recompute")
    _, fast, slow = document["rows"]
    slow |= {name: 2 * x for name, x in fast.items() if name.endswith(("_ms", "ratio"))}
    (table,) = EVALUATION.tables(document)
    assert table.rows[0][0].text == "bare step (floor)"
    assert not any(entry.is_best for row in table.rows for entry in row)
    assert [row["method"] for row in EVALUATION.summary_rows(document)] == [
        "streaming-llm",
        "recompute",
    ]


@pytest.mark.slow
def test_memories_are_full_and_beside_the_same_without(run, monkeypatch):
    """On a clock that a step moves by a second, and by one for a thousand entries it finds."""
    clock = SimpleNamespace(now=0.0)

    def slow_down(cls):
        feed = cls.feed

        def slow_feed(self, ids):
            clock.now += 1
            if (cache := memory_of(self)) is not None and cache.seen:
                is_held = [*cache.memory.of.values()][-1].held.keys.any(-1)[0, 0]
                clock.now += int(is_held.sum()) / 1e3
            return feed(self, ids)

        monkeypatch.setattr(cls, "feed", slow_feed)

    slow_down(Cached)
    slow_down(BareStep)
    time = SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr("kvalign.eval.evaluations.latency.timing.time", time)
    flags = ["--cache-sizes", "32", "--model", "llama-mini", "--methods", "window,streaming-llm"]
    document = run(*flags, "--memory", "5000,2000", "--batch-sizes", "2")
    spec, rows = load_model("llama-mini").spec, document["rows"]
    assert [row["memory"] for row in rows] == [None, 0, 5000, 2000, 0, 5000, 2000]
    a_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4
    # Of a key: half a byte a number, and a scale.
    sketch = (1 / 16 + 1 / 2 / spec.head_dim) * kernel.is_here()
    for row in rows[1:]:
        if not row["memory"]:
            assert (row["memory_ratio"], row["stored_bytes"], row["stored_ratio"]) == (1, 0, 0)
            continue
        num_slots = row["stored_bytes"] * row["memory"] / a_token / (1 + sketch)
        assert row["memory"] < num_slots < row["memory"] + 600
        assert row["memory_ratio"] == pytest.approx(1 + round(num_slots) / 1e3)
        assert row["stored_ratio"] == pytest.approx(row["stored_bytes"] / a_token)
        assert row["max_ms"] == pytest.approx(row["median_ms"])
    names = [entry[0].text for entry in EVALUATION.tables(document)[0].rows]
    assert names[2] == "window, memory 5000, 0 sinks" and len(set(names)) == 7


PB = "6.58" if kernel.is_here() else "6.14"  # 7 % more for keys in 4 bits


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--captured", "--captured needs --device cuda"),
        ("--generate 600 --methods dense", "dense ends after 512 tokens: leave it out of"),
        ("--aligner a --aligner-kinds table", "give --aligner (trained) or --aligner-kinds (untr"),
        ("--prompts missing.jsonl --model none", "no prompts at 'missing.jsonl'"),
        (
            "--model llama-mini --methods streaming-llm --memory 1000000000000",
            f"of a memory of 1000000000000 tokens need {PB} PB of memory, ",
        ),
    ],
)
def test_what_cannot_be_timed_is_said(flags, said, capsys):
    assert main([*SHORT, *flags.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_documents_from_before_the_floor_are_read(run_tiny, tmp_path):
    document = run_tiny(*TWO_SIZES, "--batch-sizes", "1,2", "--methods", "streaming-llm")
    new = ("max_ms", "bare_mean_ratio", "bare_ratio", "tokens_per_s")
    document["rows"] = [{k: v for k, v in row.items() if k not in new} for row in document["rows"]]
    (tmp_path / "old.json").write_text(json.dumps(document))
    assert main(["report", str(tmp_path)]) == 0
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"old.png", "old.svg"}


def test_models_without_a_tokenizer_take_random_prompts(run, calls, monkeypatch):
    monkeypatch.setitem(latency_models.SHAPES, "tiny", TINY)
    flags = ["--cache-sizes", "12", "--methods", "streaming-llm", "--prompts", "missing.jsonl"]
    run("--model", "shape:tiny", "--prompt-len", "9", *flags)
    assert [tuple(ids.shape) for _, ids, _ in calls[:4]] == [(1, 9)] * 3 + [(1, 13)]
    assert len(calls[0][1].unique()) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["table", "tables"])
def test_threads_are_as_before_afterwards(kinds, capsys):
    flags = ["--num-threads", "1", "--cache-sizes", "12", "--aligner-kinds", kinds]
    flags += ["--methods", "streaming-llm,kvalign", "--num-trials", "1"]
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        is_done = main([*SHORT, *flags]) == 0
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    assert is_done == (kinds == "table")
    if is_done:
        assert json.loads(capsys.readouterr().out)["environment"]["threads"] == 1


@pytest.mark.slow
def test_shapes_are_those_of_the_models():
    """Parameters in all as their authors give them, tied embeddings counted once."""
    counts = {"distilgpt2": 81_912_576, "gpt2": 124_439_808, "gpt2-xl": 1_557_611_200}
    counts |= {"smollm2-135m": 134_515_008, "qwen3-0.6b": 596_049_920, "llama-3-8b": 8_030_261_248}
    for name, shape in latency_models.SHAPES.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
        assert sum(x.numel() for x in model.parameters()) == counts[name]


@pytest.mark.slow
def test_several_batch_sizes_are_drawn_against_tokens_a_second(run_tiny, tmp_path):
    """A panel a cache size, batches on x; the floor is dashed. Of one batch size: the time per
    token over cache sizes.
    """
    flags = [*TWO_SIZES, "--methods", "streaming-llm", "--plot", f"{tmp_path}/plot.svg"]
    document = run_tiny(*flags, "--batch-sizes", "1,2")
    assert "batch size (streams)" in (tmp_path / "plot.svg").read_text()
    figure, *_ = EVALUATION.batches_figure(document)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["shape:tiny, C = 12", "shape:tiny, C = 20"]
    for axes, rows in zip(figure.axes, (document["rows"][:4], document["rows"][4:]), strict=True):
        assert axes.get_xscale() == axes.get_yscale() == "log"
        assert [line.get_linestyle() for line in axes.lines] == ["--", "-"]
        for line, own in zip(axes.lines, (rows[::2], rows[1::2]), strict=True):
            assert list(line.get_xdata()) == [1, 2]
            assert list(line.get_ydata()) == [row["tokens_per_s"] for row in own]
    assert EVALUATION.batches_figure(run_tiny(*flags)) is None
    assert "cache size (entries)" in (tmp_path / "plot.svg").read_text()


def test_what_a_step_reads_is_weights_entries_and_tables(models):
    """The embedding counts where it is the head, too; what re-encodes has no entries."""
    model, entry = models["gpt2"], 4  # bytes of float32
    spec = spec_of(model.config)
    weights = sum(x.nbytes for x in {*model.parameters(), *model.buffers()})
    size = dict(cache_size=16, warn=False)
    of_entries = 2 * spec.num_layers * spec.num_kv_heads * 17 * spec.head_dim * entry
    plain, int8, table = (
        make_method(name, model, **size, **more)
        for name, more in (
            ("streaming-llm", {}),
            ("streaming-llm", {"cache_dtype": "int8"}),
            ("kvalign", {"aligner": tables(model)}),
        )
    )
    assert read_bytes(make_method("recompute", model, **size), 3) == weights
    assert read_bytes(BareStep(model, 16), 3) == weights + 3 * of_entries
    assert read_bytes(plain, 3) == weights + 3 * of_entries
    width = (spec.head_dim + 4) / (spec.head_dim * entry)
    assert read_bytes(int8, 1) == weights + of_entries * width
    of_tables = of_entries * (spec.head_dim + 1) / spec.head_dim
    assert read_bytes(table, 1) == weights + of_entries + of_tables
