"""Training on facts and questions: the answers alone are trained and judged. The plan of a
memory that loses least on text with codes, or on facts, is found by later streams.
"""

import copy
import json
import re
from dataclasses import replace

import pytest
import torch

from kvalign.aligners.base import AlignerConfig, Verdict
from kvalign.cache.memory_sizes import layer_bias_of
from kvalign.cache.sizes import CacheSizes
from kvalign.data_gen.facts import ANSWER, NUM_VALUES, QUESTION, FactStreams
from kvalign.foundation.errors import UserError
from kvalign.memory.plan import find_plan, in_cache
from kvalign.models.loading import load_model
from kvalign.training import recall_tuning, tune_memory
from kvalign.training.recall_tuning import OF_CODES, text_with_codes
from kvalign.training.table_run import stream_loss
from kvalign.training.text import Texts

TINY = dict(cache_sizes=(16,), num_tokens=450, memory=500)


def rigged(monkeypatch, best):
    """Losses that are lowest for methods of these sizes."""

    def weighted(methods, streams):
        losses = 3 + torch.rand(400, generator=torch.Generator().manual_seed(0))
        sizes = methods[16].sizes
        hits = sum(getattr(sizes, name) == value for name, value in best.items())
        return [losses - 0.1 * hits * bool(sizes.memory)]

    monkeypatch.setattr(recall_tuning, "weighted", weighted)


def test_the_best_plan_is_written_where_it_is_found(monkeypatch, loaded):
    rigged(monkeypatch, best := {"recall_layers": "0,4-5:0.5"})
    result = tune_memory(**TINY, layers=("0", "0,4-5:0.5"), loaded=loaded)
    written = json.loads(in_cache("gpt2-mini").read_text())
    assert result["file"] == str(in_cache("gpt2-mini")) and result["plan"] == written
    plan = find_plan(loaded.model, None)
    assert plan.sizes == best | {"recall_places": "rank"}
    assert not plan.helps  # it was chosen by the text, and the usual way is as good as none
    ways = [(row["recall_places"], row["recall_layers"]) for row in result["rows"]]
    assert ways[:3] == [(None, None), ("rank", "all"), ("rank", "0-2:-2,3-5")]
    assert ways[5:8] == [("rank", "0"), ("rank", "0,4-5:0.5"), ("age", "all")]
    assert [x for _, x in ways[8:11]] == ["4-5:0.5", "0,5:0.5", "0,4:0.5"]  # each one left out


@pytest.mark.parametrize("needed", [{0, 4}, {1, 2, 3, 5}, {*range(6)}])
def test_the_fewest_layers_serve_that_are_as_good(monkeypatch, loaded, needed):
    def weighted(methods, streams):
        name, noise = methods[16].sizes.recall_layers, torch.Generator().manual_seed(0)
        missing = needed - layer_bias_of(name, range(6)).keys()  # None: all take entries back
        return [3 + torch.rand(400, generator=noise) + 0.01 * len(missing)]

    monkeypatch.setattr(recall_tuning, "weighted", weighted)
    name = tune_memory(**TINY, loaded=loaded)["plan"]["recall_layers"]
    assert name == "all" if len(needed) == 6 else layer_bias_of(name, range(6)).keys() == needed


def test_without_a_difference_a_third_of_the_layers_serves(monkeypatch, loaded):
    rigged(monkeypatch, {})
    written = tune_memory(**TINY, loaded=loaded)["plan"]
    assert (written["recall_places"], written["recall_layers"]) == ("rank", "4-5")
    assert not written["helps"]


def test_in_a_few_seconds_it_is_known_whether_a_memory_helps(monkeypatch, loaded):
    for best, is_helpful in (("rank", True), ("age", False)):
        rigged(monkeypatch, {"recall_places": best})
        result = tune_memory(**TINY, quick=True, loaded=loaded)
        assert [row["recall_places"] for row in result["rows"]] == [None, "rank"]
        assert result["plan"]["helps"] is is_helpful


@pytest.mark.parametrize("model", ["gpt2-mini", "recall-llama"])
def test_text_and_facts_are_streamed(model):
    result = tune_memory(**TINY, num_questions=10, loaded=load_model(model))
    none, usual, *others = result["rows"]
    assert none["by_none"] == usual["by_usual"] == 1 and len(others) >= 6
    assert (usual["by_none"] < 0.9) == (model == "recall-llama")  # beyond C none knows a fact


def test_a_model_with_a_chat_template_is_asked_in_turns(loaded):
    """Each code is told in one turn, and asked for in another one, in other words."""
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    )
    ids = tokenizer("The history of the island is long . " * 90)["input_ids"]
    stream = text_with_codes(16, ids, replace(loaded, tokenizer=tokenizer))
    (labels,), weights = stream.ids[:, 17:], stream.weights
    assert len(labels) == len(weights) and {0.0, 1.0} < {*weights.tolist()}
    assert weights[weights != 1].sum() == pytest.approx(OF_CODES * (weights == 1).sum().item())
    text = tokenizer.decode(stream.ids[0])
    asked = re.findall(
        r"What is the secret code of the (\w+ \w+)\?.*?code of the \1 is (\d+)", text
    )
    told = dict(re.findall(r"\[user\]The secret code of the (\w+ \w+) is (\d+)\.", text))
    assert len(asked) > 2 and all(told[owner] == code for owner, code in asked)
    answers = tokenizer.decode(labels[(weights != 0) & (weights != 1)])
    assert answers.split() == [code for _, code in asked][-len(answers.split()) :]


def test_a_method_without_a_memory_is_refused(loaded):
    with pytest.raises(UserError, match="discard-half takes no memory"):
        tune_memory(**TINY, method="discard-half", loaded=loaded)


def test_an_aligner_that_was_measured_as_worse_has_a_plan_yet(monkeypatch, loaded):
    monkeypatch.setattr(AlignerConfig, "verdict_at", lambda *_: Verdict(cache_size=16, ratio=2))
    rigged(monkeypatch, {})
    assert tune_memory(**TINY, loaded=loaded)["rows"]


CACHE_SIZE = 30
RECALL = Texts([], [], is_recall=True)


@pytest.fixture(scope="module")
def rows():
    return torch.from_numpy(FactStreams(0, 3, CACHE_SIZE).take(90))


def test_answers_are_those_of_facts_in_the_cache(rows):
    counted = RECALL.counted(rows, CACHE_SIZE).view(3, -1)
    for ids, found in zip(rows, counted, strict=True):
        labels = ids[CACHE_SIZE + 1 :]
        assert found.any() and not found.all() and (labels[found] >= ANSWER).all()
        for i in (found.nonzero()[:, 0] + CACHE_SIZE + 1).tolist():
            cache, key = ids[i - 1 - CACHE_SIZE : i - 1], ids[i - 1] - QUESTION
            facts = cache[(cache < QUESTION) & (cache // NUM_VALUES == key)]
            assert facts[-1] % NUM_VALUES == ids[i] - ANSWER
    with pytest.raises(UserError, match="no question about facts in a cache of 30"):
        RECALL.counted(torch.zeros(2, 60, dtype=torch.int64), CACHE_SIZE)


@pytest.mark.parametrize("objective", ["nll", "kl"])
def test_tables_are_tuned_by_answers(rows, objective):
    """No other token's logits have a gradient."""
    model, sizes = load_model("recall-gpt2").model, CacheSizes(CACHE_SIZE, 0)
    logits = model(rows[:, CACHE_SIZE:-1]).logits.detach().requires_grad_()
    rng = torch.Generator().manual_seed(0)
    counted = RECALL.counted(rows, CACHE_SIZE)
    stream_loss(objective, model, sizes, rows, logits, rng, counted).backward()
    trained = logits.grad.abs().sum(-1).flatten() > 0
    assert trained.sum() > 10 and counted[trained].all()
