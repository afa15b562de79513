"""Plots: ticks to read them by, whiskers, and strips in place of tangles."""

import pytest
from pandas import DataFrame

from kvalign.eval.drawing import Series, draw, draw_shares, perplexities

STYLE = ("#000000", "o", "-")
SIZES = dict(method="window", aligner=None, cache_size=32, num_sinks=0, num_evicted=1)


@pytest.mark.parametrize(
    "values", [[96.0, 98.0], [0.99, 1.01, 1.02], [50, 400], [3, 2000], [7.0, 7.0]]
)
@pytest.mark.parametrize("sizes", [[32], [32, 64], [32, 64, 128], [1, 2, 4.69], [12, 20]])
def test_axes_have_three_ticks_at_least(values, sizes):
    lines = [Series("window", STYLE, sizes, [value] * len(sizes)) for value in values]
    axes = draw({"": lines}, x="x", y="y", doubling_x=True, log_y=True).axes[0]
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        ticks = [tick for tick in axis.get_ticklocs() if low * 0.999 <= tick <= high * 1.001]
        texts = [label.get_text() for label in axis.get_ticklabels()]
        least = 1 if axis is axes.xaxis and len(sizes) == 1 else 3  # none that was not measured
        assert least <= len(ticks) <= 13 and len(set(texts)) == len(texts)


def test_whiskers_are_those_of_the_ratio_where_there_is_one():
    row = SIZES | dict(perplexity=110.0, low=80.0, high=150.0)
    (line,) = perplexities([row], "cache_size")
    assert (line.low, line.high) == ([80.0], [150.0])
    row |= dict(ratio=1.1, ratio_low=1.05, ratio_high=1.2)
    (line,) = perplexities([row], "cache_size")
    assert line.low == pytest.approx([105.0]) and line.high == pytest.approx([120.0])
    row |= dict(ratio_low=0.0, ratio_high=None)
    (line,) = perplexities([row], "cache_size")
    assert (line.low, line.high) == ([110.0], [110.0])


def test_shares_are_a_strip_of_numbers_for_each_method():
    shares = DataFrame({"1 C": [0.0, 0.0], "4 C": [0.5, 0.5], "16 C": [1.0, None]})
    shares.index = ["window", "recompute"]
    axes = draw_shares({"model": shares}, x="distance").axes[0]
    assert [text.get_text() for text in axes.texts] == ["0", "50", "100", "0", "50", "-"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [*shares.index]
    assert [label.get_text() for label in axes.get_xticklabels()] == [*shares.columns]
