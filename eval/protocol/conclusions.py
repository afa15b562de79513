"""Rows of results in words."""

from collections.abc import Iterable, Sequence

from kvalign.eval.protocol.evaluation import Row
from kvalign.eval.protocol.tables import grouped, label_of


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def spread(values: Iterable[float], digits: int) -> str:
    """The smallest and the largest of figures, or the one that all equal."""
    texts = dict.fromkeys(f"{value:.{digits}f}" for value in sorted(values))
    return " to ".join([*texts][:: max(1, len(texts) - 1)])


def farthest(rows: Sequence[Row], by: str, what: str) -> str:
    """Methods that are right at the largest distance, which `what` names, of `by` in a row."""
    most = max(row[by] for row in rows)
    last = [row for row in rows if row[by] == most]
    groups = grouped(last, label_of).items()
    figures = [f"{label} ({spread((r['accuracy'] for r in rows), 2)})" for label, rows in groups]
    return f"{what.format(most)}: {listed(figures)}."
