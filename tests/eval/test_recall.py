"""Recall: what is asked, what counts as right, and what it tells of methods."""

import json

import numpy as np
import pytest

import kvalign
from kvalign.data_gen.facts import ANSWER, ages, asked_streams, part_of
from kvalign.eval.evaluations import recall
from kvalign.eval.evaluations.recall import RecallSettings

MODEL = "recall-gpt2"


@pytest.fixture(scope="module")
def result(loaded):
    settings = RecallSettings(cache_sizes=(32, 64), num_questions=60)
    return kvalign.eval.recall(settings, loaded=loaded)


@pytest.mark.parametrize("num_streams", [1, 3])
def test_every_part_of_the_cache_has_its_questions(num_streams):
    ids, of_labels = asked_streams(
        30, num_questions=25, farthest=0, num_streams=num_streams, seed=1
    )
    first, labels = 31, ids[:, 31:]
    assert labels.shape == of_labels.shape == (num_streams, labels.shape[1])
    counted = of_labels > 0
    assert counted[:, -1].any()
    assert (labels[counted] >= ANSWER).all() and of_labels.max() <= 45
    told = np.array([ages(row) for row in ids.tolist()])[:, first:]
    assert (told[counted] == of_labels[counted]).all()
    parts = [part_of(age, 30) for age in of_labels[counted].tolist()]
    assert [parts.count(part) for part in range(5)] == [25] * 5
    assert [part_of(age, 30) for age in (1, 7, 8, 15, 16, 22, 23, 30, 31, 45)] == [
        *(0, 0, 1, 1, 2, 2, 3, 3, 4, 4)
    ]


def test_what_is_in_the_cache_is_known_and_what_is_not_is_guessed(result):
    rows = {(row["method"], row["cache_size"]): row for row in result["rows"]}
    for size in (32, 64):
        best, half = rows["recompute", size], rows["discard-half", size]
        assert best["accuracy"] > 0.95 and best["beyond"] < 0.35
        assert rows["kvalign", size]["oldest"] > 0.9
        assert half["oldest"] < best["oldest"] - 0.4
        assert 1 <= best["low"] <= best["perplexity"] < 1.3 < half["perplexity"] < half["high"]
        for part in recall.MIDDLES:
            assert best[f"{part}_low"] <= best[part] <= best[f"{part}_high"] + 1e-9


@pytest.mark.slow
def test_far_facts_are_known_to_a_memory_alone(loaded):
    sizes = dict(cache_sizes=(32,), num_sinks=(0,), memory=(0, 1000), num_questions=40)
    settings = RecallSettings(methods=("kvalign",), **sizes, farthest=8)
    _, of_labels = asked_streams(32, num_questions=40, farthest=8, num_streams=1, seed=1)
    parts = [part_of(age, 32, 8) for age in of_labels[of_labels > 0].tolist()]
    assert [parts.count(part) for part in range(7)] == [40] * 7
    assert [part_of(age, 32, 8) for age in (32, 33, 64, 65, 128, 129, 256)] == [3, 4, 4, 5, 5, 6, 6]
    document = json.loads(json.dumps(kvalign.eval.recall(settings, loaded=loaded)))
    without, with_memory = document["rows"]
    for part in ("to_2c", "to_4c", "to_8c"):
        assert without[part] < 0.4 < 0.9 < with_memory[part]
        assert with_memory[f"{part}_low"] <= with_memory[part]
    assert "to_16c" not in without
    (axes,) = recall.EVALUATION.figure(document)[0].axes
    assert axes.get_xscale() == "log" and axes.lines[0].get_xdata()[-1] == 6 * 32
