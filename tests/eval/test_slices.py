"""Recall slices, counted by hand."""

import math

import pytest
import torch

from kvalign.eval.evaluations.perplexity import SLICES, slice_figure, slice_name
from kvalign.eval.evaluations.perplexity.scores import compare, distances, of_losses, slices


def sliced(rows, losses, ids, reference):
    """Rows with their figures, and the comparison with the reference."""
    far = {name: distances(ids, kind.length) for name, kind in SLICES.items()}
    for row, nll in zip(rows, losses, strict=True):
        row |= of_losses(nll, row["cache_size"], row["first_label"], far)
    compare(rows, losses, reference, far)


EDGES = SLICES["bigrams"].edges


def test_distances_are_to_the_last_token_of_the_same_bigram():
    #       0  1  2  3  4  5  6  7  8  9
    text = [5, 6, 7, 5, 6, 6, 6, 5, 6, 7]
    #  "5 6" ends at 1, 4, 8; "6 7" at 2, 9; "6 6" at 5, 6; "7 5" and "6 5" once
    assert distances(text, 2).tolist() == [0, 0, 0, 0, 3, 0, 1, 0, 4, 7]
    assert distances([3], 2).tolist() == [0] and distances([], 2).tolist() == []
    assert distances(text, 1).tolist() == [0, 0, 0, 3, 3, 1, 1, 4, 2, 7]


def test_slices_end_with_parts_of_the_cache():
    far = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 0])
    nll = torch.arange(13.0)
    found = slices(nll, far, 8, EDGES)
    ends = [(0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0), (1.0, 2.0), (2.0, None)]
    assert [(one["from"], one["to"]) for one in found] == [*ends, (None, None)]
    labels = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11], [0, 12]]
    assert [one["num_labels"] for one in found] == [*map(len, labels)]
    means = [math.exp(sum(of) / len(of)) for of in labels]
    assert [one["perplexity"] for one in found] == pytest.approx(means)
    assert all(one["high"] is None for one in found)
    names = ["0-0.25 C", "0.25-0.5 C", "0.5-0.75 C", "0.75-1 C", "1-2 C", "over 2 C", "new"]
    assert [*map(slice_name, found)] == names


def test_ratios_are_paired():
    """`window` beside `recompute` at C = 8, on a text that repeats each 8 tokens, or never."""
    ids = [*range(9), *(n % 8 if n < 500 else 100 + n for n in range(1, 1001))]
    losses = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    worse = torch.where(distances(ids, 2)[9:] == 8, 0.5, 0.1)
    rows = [
        dict(method=name, aligner=None, cache_size=8, num_sinks=0, num_evicted=1, first_label=9)
        for name in ("recompute", "window")
    ]
    sliced(rows, [losses, losses + worse], ids, "recompute")
    old, new = rows[1]["bigrams"][3], rows[1]["bigrams"][-1]
    assert old["num_labels"] == 496 and new["num_labels"] == 503  # and one, 2 C back
    ratios = [old[name] for name in ("ratio", "ratio_low", "ratio_high")]
    assert ratios == pytest.approx([math.exp(0.5)] * 3)
    assert new["ratio"] == pytest.approx(math.exp(0.1))
    assert all(one.get("ratio") in (1.0, None) for one in rows[0]["bigrams"])


def test_a_memory_is_told_by_what_was_last_said_beyond_the_cache():
    """Of one method, with a memory and without: the reference is the one without."""
    ids = [*range(40)] * 30  # each token was last said 40 tokens ago, 5 C
    losses = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    size = dict(
        method="kvalign", aligner=None, cache_size=8, num_sinks=0, num_evicted=1, first_label=9
    )
    rows = [size | dict(memory=memory, num_recalled=2) for memory in (0, 500)]
    sliced(rows, [losses, losses - 0.1], ids, "kvalign")
    for row in rows:
        counts = [(x["from"], x["to"], x["num_labels"]) for x in row["tokens"]]
        assert counts == [(0, 1, 0), (1, 4, 0), (4, 16, 969), (16, None, 0), (None, None, 31)]
    found = rows[1]["tokens"][2]
    ratios = [found[name] for name in ("ratio", "ratio_low", "ratio_high")]
    assert ratios == pytest.approx([math.exp(-0.1)] * 3)
    document = {"rows": rows, "settings": {"model": "tiny", "reference": "kvalign"}}
    (axes,) = slice_figure(document, "tokens")[0].axes
    line = axes.containers[0].lines[0]
    assert [*line.get_ydata()] == pytest.approx([math.exp(-0.1)] * 2)
