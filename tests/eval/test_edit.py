"""What `kvalign eval edit` measures: ways to go on after an edit."""

import json

import pytest
from helpers.refusals import refused

import kvalign.eval
from kvalign import load_model
from kvalign.eval.evaluations.edit import KINDS, EditSettings
from kvalign.eval.evaluations.edit.ways import ANEW, EDITED, FORGOTTEN, UNEDITED
from kvalign.eval.report import read
from kvalign.eval.report.contents import sections
from kvalign.foundation.errors import UserError

SMALL = dict(num_before=12, num_after=8, num_future=4, lengths=5, cache_sizes=40, num_edits=3)
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


def test_rows_are_of_each_kind_and_way(of_text):
    ways = [ANEW, EDITED, AGAIN, UNEDITED, FORGOTTEN]
    found = [(row["kind"], row["way"]) for row in of_text["rows"]]
    assert found == [(kind, way) for kind in KINDS for way in ways]
    for row in of_text["rows"]:
        assert (row["length"], row["num_edits"], row["cache_size"]) == (5, 3, 40)
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert 0 <= row["agreement"] <= 1 and row["edit_ms"] >= 0 < row["seconds"]


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


def test_the_report_takes_it(of_text, tmp_path):
    (tmp_path / "edit.json").write_text(json.dumps(of_text))
    results = read(tmp_path)
    (section,) = sections(results)
    (plot,), (table,) = section.plots, section.tables
    assert plot.figure.axes[0].get_ylabel().startswith("perplexity, anew")
    titles = [axes.get_title() for axes in plot.figure.axes]
    assert titles == [f"{kind}, 5 tokens" for kind in KINDS]
    assert len(table.rows) == len(of_text["rows"])


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
