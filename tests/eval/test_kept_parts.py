"""A long evaluation that was interrupted goes on with the parts that were not finished."""

import json

import pytest

from kvalign.eval.evaluations.latency import latency, timing
from kvalign.eval.evaluations.readability import readability
from kvalign.foundation.errors import Interrupted
from kvalign.models.loading import load_model
from kvalign.streaming.text_stream import TextStream


@pytest.fixture(scope="module")
def model():
    return load_model("llama-mini")


def stop_at(monkeypatch, place, name, number):
    """The names of calls; the one of that number is Ctrl-C."""
    calls, whole = [], getattr(place, name)

    def counted(*args, **more):
        calls.append(name)
        if len(calls) == number:
            raise KeyboardInterrupt
        return whole(*args, **more)

    monkeypatch.setattr(place, name, counted)
    return calls


@pytest.mark.slow
def test_a_cache_size_that_was_timed_is_not_timed_again(model, tmp_path, monkeypatch):
    asked = dict(methods=["window", "discard-half"], num_trials=1, trial_len=2, prompts="random")
    asked |= dict(cache_sizes=[8, 16], prompt_len=8, loaded=model, keep=tmp_path / "parts")
    monkeypatch.setattr(timing, "_peak_mb", lambda *about: 1.0)
    calls = stop_at(monkeypatch, timing, "measure", 2)
    with pytest.raises(Interrupted, match="1 finished parts are kept in .*parts"):
        latency(**asked)
    (part,) = (tmp_path / "parts").glob("*.json")
    document = latency(**asked)
    assert len(calls) == 3 and [row["cache_size"] for row in document["rows"]] == 3 * [8] + 3 * [16]
    assert document["rows"][:3] == json.loads(part.read_text())["rows"]
    latency(**asked | {"trial_len": 3, "cache_sizes": [8]})
    assert len(calls) == 4  # other settings
    for damaged in ("{", part.read_text().replace('"cache_size": 8', '"cache_size": 9')):
        part.write_text(damaged)
        num = len(calls)
        latency(**asked)
        assert len(calls) == num + 1, damaged


def test_a_passage_that_was_written_is_not_written_again(model, tmp_path, monkeypatch):
    asked = dict(
        methods=["window", "discard-half"], cache_sizes=[16], max_new_tokens=4, loaded=model
    )
    whole = readability(**asked)
    asked |= dict(keep=tmp_path / "parts")
    calls = stop_at(monkeypatch, TextStream, "feed", 3)
    with pytest.raises(Interrupted, match="2 finished parts are kept in .*parts"):
        readability(**asked)
    assert json.dumps(readability(**asked)["rows"]) == json.dumps(whole["rows"])
    assert len(calls) == 5  # of two methods with two rules for n-grams
