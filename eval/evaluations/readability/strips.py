"""Strips of chunks as the paper draws them (its figures 5 and 6): a bar for each method, green
where a chunk is readable; red and low where it is not, so not by colour alone.
"""

import itertools
from operator import itemgetter

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvalign.eval.drawing.plots import THEME
from kvalign.eval.protocol.conclusions import readable
from kvalign.eval.protocol.evaluation import Document, Drawing, Row
from kvalign.eval.protocol.tables import grouped, label_of
from kvalign.foundation.escape import escape_controls

GOOD, BAD = "#2da06b", "#d1495b"
_HEIGHTS = {True: 0.8, False: 0.4}


def figures(document: Document) -> dict[str, Drawing]:
    """A figure of the strips for each cache size and prompt, the n-gram rules below each other.

    Returns:
        figures, what they show and what is seen in them, by the endings of their names.
    """
    model = document["settings"]["model"]
    drawn: dict[str, Drawing] = {}
    groups = grouped(document["rows"], itemgetter("cache_size", "prompt"))
    for (cache_size, prompt), rows in groups.items():
        by_ngram = grouped(rows, "no_repeat_ngram_size")
        panels = {_title(ngram): group for ngram, group in by_ngram.items()}
        of = f"{model}, C = {cache_size}, prompt {prompt + 1}" if model else "texts"
        ending = f"-C{cache_size}-prompt{prompt + 1}" if model else ""
        rule = document["rule"].get("name")
        said = [
            f"{title}: {readable(group)}" if title else readable(group)
            for title, group in panels.items()
        ]
        caption = f"Chunks in their order: {of}, rule {rule}"
        drawn[ending] = draw_strips(panels), caption, " ".join(said)
    return drawn


def draw_strips(panels: dict[str, list[Row]]) -> Figure:
    """The strips of rows with `chunks` and `readable`, one below the other, in panels by title."""
    nums = [len(rows) for rows in panels.values()]
    longest = max(len(row["chunks"]) for rows in panels.values() for row in rows)
    with mpl.rc_context(THEME):
        size = (7.2, 0.9 + 0.45 * len(nums) + 0.48 * sum(nums))
        figure = Figure(figsize=size, layout="constrained")
        ratios = [num + 0.2 for num in nums]
        all_axes = figure.subplots(len(nums), 1, sharex=True, squeeze=False, height_ratios=ratios)
        for axes, (title, rows) in zip(all_axes[:, 0], panels.items(), strict=True):
            for place, row in enumerate(rows):
                _draw(axes, place, [chunk[4] for chunk in row["chunks"]])
            names = [
                f"{escape_controls(label_of(row))}\n{100 * row['readable']:.0f} %" for row in rows
            ]
            axes.set_yticks(range(len(rows)), names, fontsize=8)
            for label in axes.get_yticklabels():
                label.set_parse_math(False)
            axes.set_ylim(len(rows) - 0.5, -0.6)
            axes.set_xlim(0, max(1, longest))
            axes.set_title(title, fontsize=10)
            axes.tick_params(axis="y", length=0)
            axes.spines[["top", "left", "right"]].set_visible(False)
        axes.set_xlabel("chunk")
        boxes = [mpl.patches.Patch(color=color) for color in (GOOD, BAD)]
        names = ["readable", "unreadable (low)"]
        figure.legend(boxes, names, loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    return figure


def _draw(axes: Axes, place: int, chunks: list[bool]) -> None:
    """One strip, its bottom below `place`; neighbours that are alike are one rectangle."""
    start = 0
    for is_readable, run in itertools.groupby(chunks):
        length, height = len(list(run)), _HEIGHTS[is_readable]
        color = GOOD if is_readable else BAD
        axes.broken_barh([(start, length)], (place + 0.4 - height, height), facecolor=color)
        start += length


def _title(ngram: int | None) -> str:
    if ngram is None:
        return ""
    return f"no repeated {ngram}-gram" if ngram else "repetition allowed"
