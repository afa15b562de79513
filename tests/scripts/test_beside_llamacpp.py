"""llama.cpp beside the methods: what it is asked for, the rows that its answers become, and what is
refused. xllamacpp is stood in for by one whose clock its own work alone moves; the last test asks
the real one, where it is installed.
"""

import json
import math
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
from helpers import peer_process
from helpers.tiny_gguf import TOKENS, readers, write_gguf
from helpers.tiny_models import tiny_model

from kvalign import load_model
from kvalign.eval.evaluations.latency import EVALUATION
from kvalign.eval.protocol import PEER
from kvalign.eval.report import read_document
from kvalign.foundation.errors import UserError
from kvalign.models import fetched
from scripts import beside_llamacpp as script
from scripts.beside_llamacpp import BesideSettings

FETCHED = "smollm2-135m-instruct"
STEP, SHIFT = 2.0, 30.0  # ms
READ = {64: 3.0, 128: 1.0, 256: 2.0}  # ms a token of a prompt, by n_ubatch


class Server:
    """Answers as xllamacpp's; every tenth token is told with the one after it."""

    made: ClassVar[list] = []

    def __init__(self, params):
        self.params = params
        self.made.append(self)

    def handle_completions(self, request, note=None):
        assert len(request["prompt"]) < self.params.n_ctx
        CLOCK.now += READ[self.params.n_ubatch] / 1e3 * len(request["prompt"])
        for number in range(1, request["n_predict"] + 1) if note else ():
            if number % 10 or number == request["n_predict"]:
                note(self._timings(number))
        if note:
            return note(self._timings(request["n_predict"]))  # how it ends
        biased = request.get("logit_bias", [[0, 0]])[0][0]
        return {"choices": [{"logprobs": {"content": [{"id": biased, "logprob": -1.5}]}}]}

    def _timings(self, number):
        period = (self.params.n_ctx - 1 - self.params.n_keep) // 2
        shifts = -(-(number - 1) // period)
        ms = STEP * (number - 1) + (SHIFT - STEP) * shifts
        return {"timings": {"predicted_n": number, "predicted_ms": ms}}


class Here:
    """In place of a process of its own."""

    def __init__(self, params):
        self.server = peer_process.server_of(params)

    def ask(self, asked):
        return peer_process.answers_of(self.server, asked)


CLOCK = SimpleNamespace(now=0.0)


@pytest.fixture
def stand_in(monkeypatch):
    """In place of xllamacpp; the servers that were made."""
    module = ModuleType("xllamacpp")
    module.__version__, module.Server = "0.0", Server
    module.get_system_info = lambda: "CPU : AVX2 = 1 | AVX512 = 0 | F16C = 1 | "
    module.CommonParams = lambda: SimpleNamespace(
        model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace()
    )
    monkeypatch.setitem(sys.modules, "xllamacpp", module)
    monkeypatch.setattr(script, "PeerProcess", Here)
    monkeypatch.setattr(script, "time", SimpleNamespace(perf_counter=lambda: CLOCK.now))
    monkeypatch.setattr(Server, "made", [])
    return Server.made


@pytest.fixture
def file(tmp_path):
    """The GGUF file of a tiny model."""
    readers()
    model = tiny_model(
        "llama", vocab_size=len(TOKENS), tie_word_embeddings=True, max_position_embeddings=1024
    )
    write_gguf(tmp_path / "tiny.gguf", model)
    return tmp_path / "tiny.gguf"


@pytest.fixture
def run(file):
    """The document of the script with more settings."""

    def run(**more):
        settings = BesideSettings(model=str(file), num_trials=2, trial_len=3, **more)
        return json.loads(json.dumps(script.measure(settings)))

    return run


def test_rows_are_its_answers(stand_in, run, tmp_path):
    document = run(prompts="random", prompt_len=200, num_sinks=(3,))
    path = tmp_path / "r.json"
    path.write_text(json.dumps(document))
    assert read_document(path) == document
    of_file = {"file": "tiny.gguf", "file_mb": (tmp_path / "tiny.gguf").stat().st_size / 1e6}
    about = {"name": PEER, "xllamacpp": "0.0", "build": "AVX2 F16C", **of_file}
    assert document["peer"] == about and isinstance(document["environment"]["flags"], str)
    weights = load_model(tmp_path / "tiny.gguf", dtype="float32").model.parameters()
    assert document["weights_mb"] >= sum(x.nbytes for x in weights) / 1e6
    bare, ours, row = document["rows"]
    assert [x["method"] for x in document["rows"]] == ["bare", "streaming-llm", PEER]
    period = (255 - 3) // 2
    expected = dict(cache_size=255, num_sinks=3, num_evicted=period, num_steps=2 * period)
    expected |= dict(mean_ms=(SHIFT + STEP * (period - 1)) / period, median_ms=STEP, max_ms=SHIFT)
    expected |= dict(turn_by_peer=1, prompt_by_peer=1, peer_perplexity=math.exp(1.5))
    expected |= dict(num_ubatch=128)
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    turns = [row[f"turn_{name}"] for name in ("low", "per_s", "high")]
    assert turns == pytest.approx([1e3 / row["mean_ms"]] * 3)
    assert ours["turn_by_peer"] == pytest.approx(ours["turn_per_s"] / row["turn_per_s"])
    assert ours["turn_low"] <= ours["turn_per_s"] <= ours["turn_high"]
    assert ours["prompt_by_peer"] == pytest.approx(ours["prompt_per_s"] / row["prompt_per_s"])
    assert ours["peer_perplexity"] == bare["peer_perplexity"] != row["peer_perplexity"]
    assert ours["num_ubatch"] is None

    (table,) = EVALUATION.tables(document)
    assert "peak MB" not in [column.title for column in table.columns]
    assert table.rows[-1][0].text == f"{PEER}, 3 sinks"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "gpt2-mini"}, "reads a GGUF file: name one, or smollm2-135m-instruct, got 'gpt"),
        ({"model": FETCHED}, f"the GGUF file of {FETCHED} is not here: kvalign models --fetch"),
        ({"cache_sizes": (255, 1000)}, "one more than --cache-sizes: use 1023 instead of 1000"),
    ],
)
def test_what_it_cannot_do_is_one_line(stand_in, settings, said, tmp_path, monkeypatch):
    monkeypatch.setenv(fetched.MOVED_BY, str(tmp_path))
    with pytest.raises(UserError, match=re.escape(said)):
        script.measure(BesideSettings(**settings))
    assert not stand_in


@pytest.mark.slow
def test_the_real_one_has_the_same_perplexity(run):
    """The same weights in float32, entries of its cache in float16."""
    pytest.importorskip("xllamacpp", reason="needs xllamacpp, of the extra peer")
    _, ours, theirs = run()["rows"]
    assert theirs["peer_perplexity"] == pytest.approx(ours["peer_perplexity"], rel=1e-3)
    assert theirs["num_steps"] == 2 * 125 and theirs["max_ms"] > theirs["median_ms"] > 0
