"""What a report says in words: each rule on numbers for which it must speak and for which it must
not.
"""

import random

import pytest
from helpers.results_example import documents

from kvalign.eval.evaluations import EVALUATIONS
from kvalign.eval.evaluations.perplexity import COLUMNS
from kvalign.eval.protocol.tables import MEANING, RatioVerdict, comparable, table, verdict
from kvalign.eval.report import Results
from kvalign.eval.report.contents import first_screens
from kvalign.foundation.statistics import share_interval, share_of


def row(method, ratio=1.0, low=None, high=None, *, cache_size=32, labels=2000, drift=1.0, **more):
    sizes = dict(method=method, aligner=None, cache_size=cache_size, num_sinks=0)
    sizes["num_evicted"] = cache_size // 2 if method == "discard-half" else 1
    ends = dict(ratio_low=ratio, ratio_high=ratio)
    ends |= dict(ratio_low=low, ratio_high=high) if low is not None else {}
    low, high = (end and 80.0 * end for end in (ends["ratio_low"], ends["ratio_high"]))
    ppl = dict(perplexity=80.0 * ratio, low=low, high=high)
    return sizes | ends | ppl | dict(ratio=ratio, num_labels=labels, drift=drift) | more


REFERENCE = row("recompute")


@pytest.mark.parametrize(
    ("ratio", "low", "high", "expected"),
    [
        (1.01, 0.99, 1.03, RatioVerdict.GOOD),
        (0.95, 0.93, 0.97, RatioVerdict.GOOD),
        (1.05, 0.90, 1.20, RatioVerdict.OPEN),
        (1.02, 1.01, 1.03, RatioVerdict.WORSE),
        (1.25, 1.20, 1.30, RatioVerdict.WORSE),
        (1.26, 1.20, 1.30, RatioVerdict.FAILS),
        (1.90, 0.90, 3.00, RatioVerdict.OPEN),
        (1.90, 0.0, None, RatioVerdict.UNKNOWN),
    ],
)
def test_a_ratio_is_judged_by_its_interval(ratio, low, high, expected):
    assert verdict(row("window", ratio, low, high)) is expected


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
    assert screen.about == "2000 labels of a text at C = 32, relative to recompute."
    assert [[entry.text for entry in line] for line in screen.verdicts.rows] == [
        ["recompute, 0 sinks", "reference"],
        ["kvalign, 0 sinks", "as good: 1.010"],
        ["window, 0 sinks", "fails: 1.900"],
        ["discard-half, 0 sinks", "worse: 1.050"],
        ["streaming-llm, 0 sinks", "too few labels to tell: 1.050"],
        ["dense, 0 sinks", "as good: 0.500"],
    ]
    assert screen.verdicts.note == MEANING  # the margin of "as good"
    assert screen.take == "Take kvalign: 1.010 times recompute's perplexity."
    half = {"reference": "discard-half"}
    rows = [row("discard-half"), row("kvalign", 1.012, 1.003, 1.021)]
    assert scored(rows, **half).take.startswith("Take discard-half: 1.000 times")
    assert not scored([REFERENCE, row("window", 1.9, 0.0, None, labels=60)]).take


TIMED = {  # by the taken one: ratio, low, high, ms, slowest ms of kvalign and of discard-half
    "kvalign, as good and even": [(1.01, 0.99, 1.03, 6.0, 7.0), (0.99, 0.97, 1.01, 6.1, 20.0)],
    "discard-half, better": [(1.05, 0.99, 1.08, 6.0, 7.0), (0.96, 0.95, 0.98, 9.0, 20.0)],
    "discard-half, faster": [(1.01, 0.99, 1.03, 6.0, 7.0), (0.99, 0.97, 1.01, 5.0, 20.0)],
    "kvalign, lower": [(0.98, 0.96, 1.00, 6.0, 7.0), (0.99, 0.97, 1.01, 5.9, 8.0)],
}


@pytest.mark.parametrize("taken", TIMED)
def test_of_methods_as_good_the_fast_one_is_taken_then_the_even_one(taken):
    document = documents()["frontier"]
    names = ("recompute", "kvalign", "discard-half")
    rows = []
    for name, (ratio, low, high, ms, most) in zip(
        names, [(1.0, 1.0, 1.0, 15.0, 16.0), *TIMED[taken]], strict=True
    ):
        of_time = dict(mean_ms=ms, ms_low=ms, ms_high=ms, slowest_ms=most, frontier="yes")
        by = dict(by_reference=ratio, by_reference_low=low, by_reference_high=high)
        rows.append(row(name, ratio, low, high) | of_time | by)
    document["rows"] = rows
    document["settings"] |= {"model": "m", "corpus": "a text", "reference": "recompute"}
    why = "on held-out text x has a ratio to discard-half of 1.010 at C = 32"
    judged = {"cache_size": 32, "method": "discard-half", "why": why, "num_labels": 7168}
    document["auto"] = [judged]
    (screen,) = first_screens(Results({"frontier": document}))
    name, _, _ = taken.partition(",")
    assert screen.take.startswith(f"Take {name}: ") and " of its time." in screen.take
    if "even" in taken:
        price = ", but its slowest token takes 20.0 ms, kvalign's 7.0."
        assert f"discard-half is as good here{price}" in screen.take
    said = (
        f" `auto` takes discard-half at C = 32: {why}. The 7168 labels on which its aligner was "
        "judged weigh more than the 2000 labels of this report."
    )
    assert screen.take.endswith(said) == (name == "kvalign")
    assert [one.heading for one in screen.pictures] == [
        "Perplexity against time",
        "The slowest token",
    ]
    assert [column.title for column in screen.verdicts.columns][2:] == ["ms a token", "slowest, ms"]


def test_good_at_one_size_is_not_good_at_every_one():
    rows = [
        *(REFERENCE | {"cache_size": size} for size in (32, 64)),
        row("kvalign", 1.3, 1.28, 1.32),
        row("kvalign", 1.0, 0.98, 1.02, cache_size=64),
    ]
    assert scored(rows).verdicts.rows[1][1].text == "fails at C = 32: 1.000 to 1.300"


def test_few_labels_judge_nothing_and_draw_nothing():
    rows = [REFERENCE, row("window", 1.9, 0.0, None, labels=60)]
    assert scored(rows).verdicts.rows[1][1].text == "too few labels: 1.900"
    assert scored([one | {"num_labels": 19} for one in rows]).pictures == []


def test_other_sinks_are_not_compared():
    rows = [REFERENCE, row("kvalign", 1.01, 0.99, 1.03), row("window", 1.9, 1.7, 2.1, num_sinks=4)]
    verdicts = scored(rows).verdicts
    assert [line[0].text for line in verdicts.rows] == ["recompute, 0 sinks", "kvalign, 0 sinks"]
    assert verdicts.note == f"{MEANING} Other sinks, so not compared: window, 4 sinks."


def best(rows, reference=None, column="perplexity"):
    """Methods with a mark in a column."""
    shown = table("", rows, {column: COLUMNS[column]}, reference)
    return [r["method"] for r, line in zip(rows, shown.rows, strict=True) if line[1].is_best]


def test_the_best_is_among_rows_with_equal_sinks():
    def one(method, ratio, num_sinks=0):
        return row(method, ratio, 0.99 * ratio, 1.01 * ratio, num_sinks=num_sinks)

    others = [one("window", 0.75), one("streaming-llm", 0.9, 4)]
    assert best([one("recompute", 1.0, 4), *others]) == ["streaming-llm"]
    unlike = [one("recompute", 1.0), *others]
    assert best(unlike) == best(unlike, "recompute") == []  # the latter: the paper's protocol
    without = [x | {"num_sinks": 0} for x in unlike]
    assert best(without) == ["window"]
    dense = one("dense", 0.5, 4)  # evicts nothing, so has no sinks that could differ
    assert best([*without, dense]) == ["dense"]
    assert comparable([one("window", 1.0), dense]) == []


@pytest.mark.parametrize(
    ("reference", "ratio", "marked"),
    [
        ("recompute", 1.01, ["kvalign"]),
        ("discard-half", 1.01, []),
        ("discard-half", 0.9, ["kvalign"]),
    ],
)
def test_a_reference_that_one_could_take_is_a_rival(reference, ratio, marked):
    first = row(reference, 1.0, 1.0, 1.0)
    spans = [(ratio, 0.99 * ratio, 1.01 * ratio), (1.5, 1.4, 1.6)]
    others = [row(name, *span) for name, span in zip(("kvalign", "window"), spans, strict=True)]
    assert best([first, *others], reference, "ratio") == marked


def test_a_busy_machine_has_no_verdict_on_time():
    timed = documents()["latency"]
    timed["environment"] |= {"load": 2.5, "cores": 2}
    assert EVALUATIONS["latency"].doubt(timed) == ""
    loaded = timed | {"environment": {"load": 4.0, "cores": 2}}  # bare steps are slow, but even
    assert "busy (a load of 4 on 2 cores)" in EVALUATIONS["latency"].doubt(loaded)
    screen = first_screens(Results({"latency": timed}))[0]
    assert "ms a token" in [column.title for column in screen.verdicts.columns]
    timed["rows"][0]["mean_ms"] = 1.3 * timed["rows"][0]["median_ms"]
    screen = first_screens(Results({"latency": timed}))[0]
    assert screen.about.startswith("The machine was busy") and "is 1.3 times" in screen.about
    assert screen.verdicts is None and "busy" in screen.pictures[0].heading


def test_a_model_has_its_first_screen_and_texts_have_none():
    (screen,) = first_screens(Results(documents()))
    names = [plot.name.rpartition("-")[0] for plot in screen.pictures]
    assert names == ["first-frontier", "first-time", "first-recall"]
    readability = documents()["readability"]
    readability["settings"]["model"] = None
    assert first_screens(Results({"texts": readability})) == []


def test_an_interval_of_a_share():
    low, high = share_interval(0.5, 10)  # Wilson's, by hand: 0.2366, 0.7634
    assert (round(low, 4), round(high, 4)) == (0.2366, 0.7634)


def test_answers_of_one_stream_are_no_independent_ones():
    """Twelve conversations of eight questions, all alike within one: twelve values, not 96."""
    rng, covered = random.Random(0), {"alike": 0, "independent": 0}
    for _ in range(1000):
        alike = [[float(rng.random() < 0.7)] * 8 for _ in range(12)]
        independent = [[float(rng.random() < 0.7) for _ in range(8)] for _ in range(12)]
        for name, groups in (("alike", alike), ("independent", independent)):
            row = share_of("x", groups)
            covered[name] += row["x_low"] <= 0.7 <= row["x_high"]
    assert 930 <= covered["alike"] <= 985 and 930 <= covered["independent"] <= 985
    one_each, one = share_of("x", [[1.0]] * 5 + [[0.0]] * 5), share_of("x", [[1.0, 0.0] * 5])
    assert (one_each["x_low"], one_each["x_high"]) == (one["x_low"], one["x_high"])
    assert (one["x_low"], one["x_high"]) == share_interval(0.5, 10)
