"""What a report says in words: each rule on numbers for which it must speak and for which it must
not.
"""

import pytest
from helpers.results_example import documents

from kvalign.eval.protocol import conclusions
from kvalign.eval.protocol.conclusions import cost
from kvalign.eval.protocol.verdicts import Verdict, drifts, runs_interval, share_interval, verdict
from kvalign.eval.report.first_screen import first_screens
from kvalign.eval.report.results_folder import Results


def row(method, ratio=1.0, low=None, high=None, *, cache_size=32, labels=2000, drift=1.0, **more):
    sizes = dict(method=method, aligner=None, cache_size=cache_size, num_sinks=0, num_evicted=1)
    ends = dict(ratio_low=ratio, ratio_high=ratio)
    ends |= dict(ratio_low=low, ratio_high=high) if low is not None else {}
    ppl = dict(perplexity=80.0 * ratio, low=60.0 * ratio, high=100.0 * ratio)
    return sizes | ends | ppl | dict(ratio=ratio, num_labels=labels, drift=drift) | more


REFERENCE = row("recompute")


@pytest.mark.parametrize(
    ("ratio", "low", "high", "expected"),
    [
        (1.01, 0.99, 1.03, Verdict.GOOD),
        (0.95, 0.93, 0.97, Verdict.GOOD),
        (1.05, 0.90, 1.20, Verdict.OPEN),
        (1.02, 1.01, 1.03, Verdict.WORSE),
        (1.25, 1.20, 1.30, Verdict.WORSE),
        (1.26, 1.20, 1.30, Verdict.FAILS),
        (1.90, 0.90, 3.00, Verdict.OPEN),
        (1.90, 0.0, None, Verdict.UNKNOWN),
    ],
)
def test_a_ratio_is_judged_by_its_interval(ratio, low, high, expected):
    assert verdict(row("window", ratio, low, high)) is expected


def test_drift_speaks_of_enough_labels_and_of_what_is_worse():
    bad = row("window", 1.5, 1.4, 1.6, drift=1.2)
    assert drifts(bad)
    assert not drifts(bad | {"num_labels": 799})  # quarters of fewer than 200
    assert not drifts(bad | {"drift": 1.09})
    assert not drifts(row("window", 1.0, 0.97, 1.02, drift=1.2))


def scored(rows, reference="recompute"):
    """First screen of these rows of perplexities."""
    document = documents()["perplexity"]
    more = dict(segments=[], bigrams=[], tokens=[])
    document["rows"] = [one | more for one in rows]
    document["settings"] |= {"model": "m", "corpus": "a text", "reference": reference}
    (screen,) = first_screens(Results({"perplexity": document}))
    return screen


def test_a_method_has_a_row_with_its_verdict():
    rows = [
        REFERENCE,
        row("kvalign", 1.01, 0.99, 1.03),
        row("window", 1.9, 1.7, 2.1, drift=1.3),
        row("discard-half", 1.05, 1.02, 1.08),
        row("streaming-llm", 1.05, 0.9, 1.2),
        row("dense", 0.5, 0.4, 0.6),
    ]
    screen = scored(rows)
    assert screen.sentences == [
        "On 2000 labels of a text at C = 32, kvalign with 0 sinks and dense with 0 sinks are as "
        "good as recompute; window with 0 sinks fails."
    ]
    assert screen.verdicts is not None
    assert [[entry.text for entry in line] for line in screen.verdicts.rows] == [
        ["recompute, 0 sinks", "reference"],
        ["kvalign, 0 sinks", "as good: 1.01"],
        ["window, 0 sinks", "fails: 1.90"],
        ["discard-half, 0 sinks", "worse: 1.05"],
        ["streaming-llm, 0 sinks", "too few labels to tell: 1.05"],
        ["dense, 0 sinks", "as good: 0.50"],
    ]


def test_good_at_one_size_is_not_good_at_every_one():
    rows = [
        *(REFERENCE | {"cache_size": size} for size in (32, 64)),
        row("kvalign", 1.3, 1.28, 1.32),
        row("kvalign", 1.0, 0.98, 1.02, cache_size=64),
    ]
    screen = scored(rows)
    assert "no method is shown to be as good as recompute at every C" in screen.sentences[0]
    assert screen.verdicts.rows[1][1].text == "fails at C = 32: 1.00 to 1.30"


def test_few_labels_judge_nothing_and_draw_nothing():
    rows = [REFERENCE, row("window", 1.9, 0.0, None, labels=60)]
    (sentence,) = scored(rows).sentences
    assert sentence.endswith("too few labels to distinguish any method from recompute.")
    assert scored(rows).verdicts.rows[1][1].text == "too few labels: 1.90"
    assert scored([one | {"num_labels": 19} for one in rows]).pictures == []


def test_other_sinks_are_not_compared():
    rows = [REFERENCE, row("kvalign", 1.01, 0.99, 1.03), row("window", 1.9, 1.7, 2.1, num_sinks=4)]
    verdicts = scored(rows).verdicts
    assert [line[0].text for line in verdicts.rows] == ["recompute, 0 sinks", "kvalign, 0 sinks"]
    assert verdicts.note == "Other sinks, so not compared: window, 4 sinks."


def test_without_a_reference_no_ratio_is_said():
    (sentence,) = scored([row("window"), row("recompute", 0.9)], None).sentences
    assert "no reference" in sentence and "--reference recompute" in sentence
    assert "recompute with 0 sinks at C = 32 (72.0, its interval overlaps 1 more)." in sentence
    (sentence,) = scored([row("window")], None).sentences
    assert sentence.endswith("window with 0 sinks was measured alone: perplexity 80.0.")


def test_a_busy_machine_has_no_verdict_on_time():
    timed = documents()["latency"]
    assert conclusions.busy(timed["rows"]) is None
    screen = first_screens(Results({"latency": timed}))[0]
    assert "time of a step" in [column.title for column in screen.verdicts.columns]
    timed["rows"][0]["mean_ms"] = 1.3 * timed["rows"][0]["median_ms"]
    screen = first_screens(Results({"latency": timed}))[0]
    assert screen.sentences == [conclusions.BUSY.format(1.3)]
    assert screen.verdicts is None and "busy" in screen.pictures[0].conclusion


def test_where_all_are_readable_repetition_is_said():
    document = documents()["readability"]
    document["rows"] = [one | {"readable": 1.0} for one in document["rows"]]
    document["rows"][1]["repetition"] = 0.25
    (sentence,) = first_screens(Results({"readability": document}))[0].sentences
    assert sentence.startswith("All methods write readable words, so go by perplexity")


def test_cost_is_of_what_does_not_fail():
    rows = [
        row("bare", bare_mean_ratio=1.0),
        row("window", bare_mean_ratio=1.1),
        row("kvalign", bare_mean_ratio=1.3),
        row("recompute", bare_mean_ratio=4.0),
    ]
    said = cost(rows, ["kvalign with 0 sinks"], "recompute")
    assert said.endswith("kvalign with 0 sinks 1.30; recompute with 0 sinks 4.00.")
    assert "window" not in said and "bare with" not in said
    assert "of all" in cost(rows) and "window with 0 sinks 1.10" in cost(rows)
    assert cost([row("window")]) == ""


def written(method, readable, num_runs=20, repetition=0.0):
    """A row of runs of 60 chunks, which differ by at most 0.04."""
    shares = [min(max(readable + (i % 5 - 2) / 50, 0.0), 1.0) for i in range(num_runs)]
    more = dict(readable=readable, num_passages=num_runs, repetition=repetition)
    if ends := runs_interval(shares, 60 * num_runs):
        more |= dict(zip(("readable_low", "readable_high"), ends, strict=True))
    return row(method, **more)


def test_words_are_compared_where_intervals_are_apart():
    base = written("recompute", 0.95)
    assert conclusions.beside([base, written("window", 0.5), written("kvalign", 0.93)]) == (
        "less readable than recompute's 95 % of 20 passages: window with 0 sinks 50 %."
    )
    said = conclusions.beside([base, written("kvalign", 0.93)])
    assert said.startswith("none differs from recompute's 95 %")
    assert conclusions.beside([written("recompute", 1.0, 4), written("window", 0.0, 4)]) == ""
    assert conclusions.beside([written("window", 0.5)]) == ""


def test_a_model_has_its_first_screen_and_texts_have_none():
    (screen,) = first_screens(Results(documents()))
    assert len(screen.sentences) == 3
    assert [plot.name for plot in screen.pictures] == ["first-time", "first-readability"]
    readability = documents()["readability"]
    readability["settings"]["model"] = None
    assert first_screens(Results({"texts": readability})) == []


def test_plots_have_conclusions():
    rows = [
        REFERENCE,
        row("window", 1.9, 1.7, 2.1, drift=1.73),
        row("kvalign", 1.0, 0.98, 1.02, drift=1.1),
    ]
    assert conclusions.by_size(rows, "recompute") == (
        "Here kvalign with 0 sinks is as good as recompute; window with 0 sinks (1.90 times) fails."
    )
    assert conclusions.by_size(rows[::2], None) == (
        "Lowest: recompute with 0 sinks at C = 32 (80.0, its interval overlaps 1 more)."
    )
    middling = [REFERENCE, row("window", 1.1, 0.9, 1.4)]
    said = conclusions.by_size(middling, "recompute")
    assert said == "Here no method is shown to be as good as recompute (1.10 times)."
    assert conclusions.by_drift(rows[1:], "recompute") == (
        "Errors accumulate: window with 0 sinks, drift 1.730."
    )
    assert conclusions.by_drift(rows[2:], "recompute") == (
        "No errors are shown to accumulate: drift is 1.10."
    )
    few = [one | {"num_labels": 60} for one in rows[1:]]
    assert conclusions.by_drift(few, "recompute") == (
        "60 labels are too few to measure drift, which needs 800."
    )
    assert "ups and downs" in conclusions.by_drift(rows, None)
    slow, fast = row("recompute", seconds=9.0), row("kvalign", 1.02, seconds=2.0)
    assert conclusions.by_time([slow, fast, row("window", 1.9, seconds=1.0)]) == (
        "Lowest: recompute with 0 sinks at C = 32 (80.0 in 9 s). The fastest of those within 5 % "
        "of it: kvalign with 0 sinks at C = 32 (81.6 in 2 s)."
    )
    assert conclusions.readable([written("window", 0.2), written("recompute", 0.9)]) == (
        "Readable chunks: 90 % (recompute with 0 sinks) to 20 % (window with 0 sinks)."
    )
    few = [written("window", 0.4, 5), written("recompute", 0.6, 5)]
    assert conclusions.readable(few).endswith(", from too few runs to distinguish them.")
    few = [written("window", 0.0, 4), written("recompute", 1.0, 4)]  # all and none, of four
    assert conclusions.readable(few).endswith(", from too few runs to distinguish them.")


def test_an_interval_of_a_share():
    low, high = share_interval(0.5, 10)  # Wilson's, by hand: 0.2366, 0.7634
    assert (round(low, 4), round(high, 4)) == (0.2366, 0.7634)
    assert share_interval(0.0, 0) is None


def test_chunks_of_one_run_count_as_the_runs_scatter():
    """By hand: 0.5 +- 2.09 standard errors of twenty runs, 0.0229 each."""
    low, high = runs_interval([0.4, 0.6] * 10, 1000)
    assert (round(low, 3), round(high, 3)) == (0.452, 0.548)
    assert runs_interval([0.4, 0.6] * 9, 1000) is None
    all_readable = runs_interval([1.0] * 20, 1000)
    one_is_not = runs_interval([0.98] + [1.0] * 19, 1000)
    assert (round(all_readable[0], 4), all_readable[1]) == (0.9957, 1.0)  # 0 of 1000, by hand
    assert one_is_not[0] < all_readable[0] and one_is_not[1] < 1
    assert runs_interval([1.0] * 20, 100)[0] < 0.97, "few chunks say less"
    assert runs_interval([0.4, 0.6] * 10, 25)[0] < 0.4, "no more chunks than there are"
