"""Only rows with equal sinks are judged: the mark of the best."""

from kvalign.eval.evaluations.perplexity import COLUMNS
from kvalign.eval.protocol.tables import table
from kvalign.eval.protocol.verdicts import comparable


def row(method, num_sinks, perplexity, cache_size=64):
    """Perplexity and its ratio to 80, with narrow intervals."""
    sizes = dict(method=method, aligner=None, cache_size=cache_size, num_sinks=num_sinks)
    figures = {"perplexity": perplexity, "ratio": perplexity / 80}
    ends = {f"{name}{end}": x * by for name, x in zip(("", "ratio_"), figures.values(), strict=True)
            for end, by in (("low", 0.999), ("high", 1.001))}  # fmt: skip
    return {**sizes, "num_evicted": 1, "num_labels": 2000, **figures, **ends, "drift": 1.0}


EQUAL = [row("recompute", 4, 80.0), row("window", 0, 60.0), row("streaming-llm", 4, 70.0)]
UNLIKE = [row("recompute", 0, 80.0), row("window", 0, 60.0), row("streaming-llm", 4, 70.0)]


def best(rows, reference=None):
    """Methods with a mark in the column of perplexities."""
    shown = table("", rows, {"perplexity": COLUMNS["perplexity"]}, reference)
    return [r["method"] for r, line in zip(rows, shown.rows, strict=True) if line[1].is_best]


def test_the_best_is_among_rows_with_equal_sinks():
    assert best(EQUAL) == ["streaming-llm"] and best(UNLIKE) == []
    assert best(UNLIKE, "recompute") == []  # the paper's protocol
    without = [one | {"num_sinks": 0} for one in EQUAL]
    assert best(without) == ["window"]
    dense = row("dense", 4, 50.0)  # evicts nothing, so has no sinks that could differ
    assert best([*without, dense]) == ["dense"]
    assert comparable([row("window", 0, 1.0), dense]) == []
