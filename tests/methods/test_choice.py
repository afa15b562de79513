"""`auto`: what it takes on each family, with an aligner and without; a name overrides it."""

import logging
from pathlib import Path

import pytest
import torch
from helpers.methods import CACHE_SIZE, network, tables
from helpers.tiny_models import CONTEXT_LEN as LONGEST
from helpers.tiny_models import KINDS, tiny_model

import kvalign
from kvalign import make_cache, make_method
from kvalign.methods import choice
from kvalign.methods.registry import AUTO
from kvalign.models.architectures import FAMILIES

WITHOUT = {"learned": "discard-half", "rotary": "streaming-llm", "alibi": "streaming-llm"}
PROMPT = torch.tensor([[5, 6, 7]])


@pytest.fixture(autouse=True)
def nothing_said_yet():
    choice.warn_once.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_aligner_it_goes_by_the_family(kind, models, caplog):
    caplog.set_level(logging.INFO, "kvalign")
    method = make_method(AUTO, models[kind], cache_size=CACHE_SIZE)
    assert method.name == WITHOUT[FAMILIES[kind]] and not method.goes_stale
    assert f"auto uses {method.name}: {FAMILIES[kind]} positions" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_an_aligner_that_is_given_means_kvalign(kind, models):
    for aligner in (network(models[kind]), tables(models[kind])):
        method = make_method(AUTO, models[kind], cache_size=CACHE_SIZE, aligner=aligner)
        assert method.name == "kvalign" and method.aligner is aligner


def test_a_shipped_aligner_is_taken_as_far_as_it_reaches(minis, caplog):
    long = make_method(AUTO, minis["gpt2-mini"].model, cache_size=511)
    assert long.aligner is not None and long.aligner.config.kind == "table-network"
    assert choice.aligners_at_hand(long.model)[0] == "kvalign-gpt2-mini-table-network"
    model = minis["llama-mini"].model
    assert make_method(AUTO, model, cache_size=255).name == "kvalign"
    assert make_method(AUTO, model, cache_size=256).name == WITHOUT["rotary"]
    with pytest.raises(ValueError, match="at most 255 with the aligner kvalign-"):
        make_method("kvalign", model, cache_size=256)
    longest = "is for at most 255 entries"
    assert longest in choice.obstacles(model, cache_size=256)["kvalign"]
    assert not choice.obstacles(model, cache_size=255)


def test_it_is_the_default_of_all_that_streams(models, minis):
    one = minis["llama-mini"]
    talk = kvalign.stream(one.model, one.tokenizer, "It", cache_size=16, max_new_tokens=2, seed=0)
    assert talk.method.name == "kvalign" and len(list(talk)) <= 2
    for kind in ("gpt2", "llama"):
        model = models[kind]
        sizes = dict(cache_size=CACHE_SIZE, max_new_tokens=LONGEST, do_sample=False)
        first, second = (
            model.generate(PROMPT, custom_generate=kvalign.stream_generate, **method, **sizes)
            for method in ({}, {"method": WITHOUT[FAMILIES[kind]]})
        )
        assert torch.equal(first, second)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_is_one_that_stays_right(kind, models):
    model = models[kind]
    given = make_cache(model, cache_size=CACHE_SIZE, aligner=tables(model))
    assert given.realigner.strategy != "keep"  # which leaves them stale
    if FAMILIES[kind] != "learned":
        assert make_cache(model, cache_size=CACHE_SIZE).sizes.num_sinks == 4
        return
    with pytest.raises(
        ValueError, match="no cache keeps entries correct on this model.*leaves entries sta"
    ):
        make_cache(model, cache_size=CACHE_SIZE)


@pytest.mark.parametrize("name", ["streaming-llm", "window"])
def test_entries_that_go_stale_are_said_once(name, models, caplog):
    for kind in ("gpt2", "llama", "bloom"):
        for _ in range(2):
            method = make_method(name, models[kind], cache_size=CACHE_SIZE)
            assert method.goes_stale == (kind == "gpt2")
    (said,) = caplog.messages
    assert said.startswith(f"{name}: this model has learned positions, so kept entries become st")
    assert said.endswith("auto uses discard-half")


@pytest.fixture
def mine(tmp_path, monkeypatch, models):
    """A model of the name `mine`, and a function that saves an aligner where training would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models["gpt2"].config, "name_or_path", "some/where/mine/")

    def train(scale=0.3, **about):
        aligner = tables(models["gpt2"], scale=scale)
        aligner.config.training["key"] = about
        aligner.save_pretrained(tmp_path / "kvalign-data/mine/table")
        return aligner

    return models["gpt2"], train


def test_what_was_trained_here_is_of_this_very_model(mine, monkeypatch):
    (model, train), folder = mine, Path("kvalign-data/mine/table")
    assert choice.trained_here(model) is None
    train(used=False)
    assert choice.trained_here(model) is None, "it changes nothing"
    assert choice.trained_here(model, at_least="any")
    train(used=True)
    assert choice.trained_here(model, at_least="judged") is None
    train(used=True, judged={"parts": ["key"]})
    assert choice.trained_here(model, at_least="judged") == folder
    other = tiny_model("gpt2", n_embd=64)
    monkeypatch.setattr(other.config, "name_or_path", "mine")
    assert choice.trained_here(other) is None
    assert choice.trained_here(tiny_model("gpt2")) is None, "a model without a name has no folder"


@pytest.mark.parametrize(
    ("taken", "size"),
    [
        *zip(["kvalign"] * 4, (8, 16, 28, None), strict=True),
        *zip(["discard-half"] * 3, (20, 24, 26), strict=True),
    ],
)
def test_auto_takes_what_was_measured_as_better(mine, caplog, size, taken):
    """Between judged sizes by the worse of the two; what needs a cache takes the aligner."""
    model, train = mine
    ratios = [(16, 0.98, 0.97, 0.99), (24, 1.01, 1.002, 1.02), (28, 0.99, None, None)]
    names = ("cache_size", "ratio", "low", "high")
    verdicts = [dict(zip(names, one, strict=True)) for one in ratios]
    of_streams = dict(parts=["key"], num_sinks=0, streams=[], cache_sizes=[16, 24, 28])
    figures = dict(num_labels=9, num_choosing=9, val_nll=1.0, discard_half=1.0)
    train(used=True, judged={"against_discard_half": verdicts, **of_streams, **figures})
    card = Path("kvalign-data/mine/table/README.md").read_text()
    assert "| 0.980 (0.970 to 0.990) | 1.010 (1.002 to 1.020) | 0.990 |" in card
    caplog.set_level(logging.INFO, "kvalign")
    method = make_method(AUTO, model, cache_size=size)
    assert method.name == taken and method.sizes.num_sinks == 0  # with which it was measured
    assert ("1.010 (1.002 to 1.020) at C = 24" in caplog.text) == (taken != "kvalign")
    if size == 24:
        assert make_method("kvalign", model, cache_size=size).name == "kvalign"
        assert make_method(AUTO, model, cache_size=size, memory=50).name == "kvalign"
        assert "at C = 24, but discard-half keeps no such cache" in caplog.text
        assert make_cache(model, cache_size=size).realigner.strategy != "keep"


def test_an_aligner_that_changes_nothing_is_not_asked_for_again(mine, caplog):
    model, train = mine
    caplog.set_level(logging.INFO, "kvalign")
    train(used=False)
    assert make_method(AUTO, model, cache_size=CACHE_SIZE).name == "discard-half"
    assert "trained here, helps no stream" in caplog.text and "makes one" not in caplog.text
