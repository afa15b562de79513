"""What `kvalign eval edit` measures: ways to go on after an edit, of texts and of facts."""

import json

import pytest
from helpers.refusals import refused

import kvalign.eval
from kvalign import load_model
from kvalign.eval.evaluations.edit import ANEW, EDITED, FORGOTTEN, KINDS, UNEDITED, EditSettings
from kvalign.eval.report import read
from kvalign.eval.report.contents import sections, summary
from kvalign.foundation.errors import UserError

SMALL = dict(num_before=12, num_after=8, num_future=4, lengths=5, cache_sizes=40, num_edits=3)
OF_FACTS = dict(num_before=16, num_after=24, num_future=1, lengths=16, cache_sizes=64, num_edits=40)
AGAIN = f"{EDITED}, 7 encoded again"  # all that stands behind, but the last, which is fed


def by_way(document, kind="cut"):
    return {row["way"]: row for row in document["rows"] if row["kind"] == kind}


@pytest.fixture(scope="module", autouse=True)
def timed_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvalign.eval.evaluations.edit.ways.NUM_TIMED", 1)
        yield


@pytest.fixture(scope="module")
def of_text():
    loaded = load_model("llama-mini")
    return kvalign.eval.edit(**SMALL, methods="streaming-llm", exactly=(0, 7, 7), loaded=loaded)


@pytest.fixture(scope="module")
def of_facts():
    loaded = load_model("recall-gpt2")
    kinds = ("cut", "insert")
    return kvalign.eval.edit(**OF_FACTS, methods="kvalign", kinds=kinds, exactly=0, loaded=loaded)


def test_rows_are_of_each_kind_and_way(of_text):
    ways = [ANEW, EDITED, AGAIN, UNEDITED, FORGOTTEN]
    found = [(row["kind"], row["way"]) for row in of_text["rows"]]
    assert found == [(kind, way) for kind in KINDS for way in ways]
    for row in of_text["rows"]:
        assert (row["length"], row["num_edits"], row["cache_size"]) == (5, 3, 40)
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert 0 <= row["agreement"] <= 1 and row["edit_ms"] >= 0 < row["seconds"]
        assert "kept" not in row and "told" not in row


def test_what_is_encoded(of_text):
    """All of the text, the new tokens, and those behind that are encoded again."""
    for kind, num_new in (("cut", 0), ("replace", 5), ("insert", 5)):
        encoded = {way: row["encoded"] for way, row in by_way(of_text, kind).items()}
        anew = 12 + num_new + 7
        again = {EDITED: num_new, AGAIN: num_new + 7, FORGOTTEN: num_new}
        assert encoded == {ANEW: anew, UNEDITED: 0, **again}


@pytest.mark.parametrize("kind", KINDS)
def test_all_encoded_again_is_anew(kind, of_text):
    ways = by_way(of_text, kind)
    anew = ways[ANEW]
    assert [anew[name] for name in ("ratio", "ratio_low", "ratio_high", "agreement")] == [1] * 4
    assert ways[AGAIN]["perplexity"] == pytest.approx(anew["perplexity"], rel=1e-4)
    assert ways[AGAIN]["agreement"] == 1
    for way in (EDITED, UNEDITED, FORGOTTEN):
        assert ways[way]["ratio"] != pytest.approx(1, abs=1e-4)


def test_facts_behind_an_edit_are_answered_and_those_cut_are_not(of_facts):
    """0.125 of the answers are right by chance."""
    ways = by_way(of_facts)
    assert ways[ANEW]["kept"] == ways[EDITED]["kept"] == ways[UNEDITED]["kept"] == 1
    assert ways[FORGOTTEN]["kept_high"] < 0.5
    assert ways[UNEDITED]["told"] == 1
    assert ways[EDITED]["told_high"] < 0.4 and ways[ANEW]["told_high"] < 0.4
    inserted = by_way(of_facts, "insert")
    assert inserted[EDITED]["kept"] == 1 and "told" not in inserted[EDITED]
    assert inserted[EDITED]["read"] == inserted[ANEW]["read"] > 0.9 > inserted[UNEDITED]["read"]


@pytest.mark.parametrize("name", ["of_text", "of_facts"])
def test_the_report_takes_it(name, request, tmp_path):
    document = request.getfixturevalue(name)
    (tmp_path / "edit.json").write_text(json.dumps(document))
    results = read(tmp_path)
    (section,) = sections(results)
    (plot,), (table,) = section.plots, section.tables
    figure = {"of_text": "perplexity, anew", "of_facts": "answered behind"}[name]
    assert plot.figure.axes[0].get_ylabel().startswith(figure)
    titles = [axes.get_title() for axes in plot.figure.axes]
    kinds = dict.fromkeys(row["kind"] for row in document["rows"])
    assert titles == [f"{kind}, {document['rows'][0]['length']} tokens" for kind in kinds]
    assert len(table.rows) == len(document["rows"])
    (line,) = summary(results)[0].rows
    edited = [row for row in document["rows"] if row["way"] == EDITED]
    shown = "ratio" if name == "of_text" else "kept"
    mean = sum(row[shown] for row in edited) / len(edited)
    assert f"{mean:.3f}" in [entry.text for entry in line]


def test_what_cannot_be_measured_is_refused(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match="a text has 29 tokens .* give --cache-sizes of at least 29"
    ):
        EditSettings(**SMALL | dict(cache_sizes=(40, 28)))
    words = "eval edit --model llama-mini --num-edits 1 --num-before 8 --num-after 4 --num-future 1"
    words += " --lengths 2 --exactly 0 --cache-sizes 20"
    said = "streams of recompute cannot be edited: it does not move entries"
    monkeypatch.setattr("kvalign.foundation.progress.LINE_S", 1e6)
    refused([*words.split(), "--methods", "recompute"], said, capfd)
    (tmp_path / "a.txt").write_text("The island was settled. " * 3)
    refused([*words.split(), "--num-edits", "40", "--corpus", "text:a.txt"], "--num-edits", capfd)
