"""Strips, one for each method: of chunks, as in the paper's figures 5 and 6, or of shares in %, as
a heat map.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvalign.eval.drawing.plots import THEME
from kvalign.eval.protocol.evaluation import Row
from kvalign.eval.protocol.tables import grouped, label_of
from kvalign.foundation.escape import escape_controls

GOOD, BAD = "#2da06b", "#d1495b"
_HEIGHTS = {True: 0.8, False: 0.4}
COLORS = LinearSegmentedColormap.from_list("readable", ["#efdcc0", "#bfe3d0", "#3fb27f"])
TEXT = "#14181d"  # 7:1 and more on each of these
NOT_TRIED = "#9aa0a6"
MAX_CELLS = 16  # of a strip of answers; more are put together


def draw_chunks(panels: dict[str, list[Row]], width: float = 7.2, height: float = 0.48) -> Figure:
    """Chunks of rows with `chunks` and `readable`, in panels by title: readable ones green and
    high, others red and low, so not only by colour.
    """
    longest = max(len(row["chunks"]) for rows in panels.values() for row in rows)
    names = {
        title: [f"{label_of(row)}\n{100 * row['readable']:.0f} %" for row in rows]
        for title, rows in panels.items()
    }
    with mpl.rc_context(THEME):
        figure = Figure(layout="constrained")
        all_axes = _stack(figure, names, width, height, sharex=True)
        for axes, rows in zip(all_axes, panels.values(), strict=True):
            for number, row in enumerate(rows):
                _draw_chunks(axes, number, [chunk[4] for chunk in row["chunks"]])
            axes.set_ylim(len(rows) - 0.5, -0.6)
            axes.set_xlim(0, max(1, longest))
            axes.tick_params(axis="y", length=0)
            axes.spines[["top", "left", "right"]].set_visible(False)
        axes.set_xlabel("chunk")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        boxes = [mpl.patches.Patch(color=color) for color in (GOOD, BAD)]
        where: dict[str, Any] = dict(loc="outside lower right", ncols=2, fontsize=8, frameon=False)
        figure.legend(boxes, ["readable", "unreadable (low)"], **where)
    return figure


def _draw_chunks(axes: Axes, y: int, chunks: list[bool]) -> None:
    """One strip, its bottom below `y`; neighbours that are alike are one rectangle."""
    start = 0
    for is_readable, run in itertools.groupby(chunks):
        length, height = len(list(run)), _HEIGHTS[is_readable]
        color = GOOD if is_readable else BAD
        axes.broken_barh([(start, length)], (y + 0.4 - height, height), facecolor=color)
        start += length


Shares = tuple[dict[str, list[float | None]], list[str]]
"""Of each method a share in a cell, None for what could not be tried; and what the cells are of."""


def draw_answers(panels: dict[str, list[Row]]) -> Figure:
    """Readable share of the answers in %, in panels by title."""
    return draw_shares({title: _shares(rows) for title, rows in panels.items()}, x="answer")


def draw_shares(panels: dict[str, Shares], x: str) -> Figure:
    """Shares in %, in panels by title."""
    names = {title: [*shares] for title, (shares, _) in panels.items()}
    with mpl.rc_context(THEME):
        figure = Figure(layout="constrained")
        all_axes = _stack(figure, names, 7.6, 0.36, sharex=False)
        for axes, (shares, cells) in zip(all_axes, panels.values(), strict=True):
            _draw_shares(axes, list(shares.values()), cells)
        axes.set_xlabel(x)
    return figure


def _shares(rows: list[Row]) -> Shares:
    """The shares of each method, means of neighbours if there are many, and what they are of."""
    groups = grouped(rows, label_of)
    num = max(map(len, groups.values()))
    cells = np.array_split(np.arange(num), min(num, MAX_CELLS))
    names = [f"{c[0] + 1}" if len(c) == 1 else f"{c[0] + 1}-{c[-1] + 1}" for c in cells]
    shares: dict[str, list[float | None]] = {
        label: [float(np.mean([group[i]["readable"] for i in cell])) for cell in cells]
        for label, group in groups.items()
    }
    return shares, names


def _draw_shares(axes: Axes, strips: list[list[float | None]], names: list[str]) -> None:
    layout: dict[str, Any] = dict(ha="center", va="center", color=TEXT, fontsize=8)
    for y, strip in enumerate(strips):
        for x, share in enumerate(strip):
            cell: dict[str, Any] = dict(facecolor="none", edgecolor=NOT_TRIED, hatch="///", lw=0)
            if share is not None:
                cell = dict(color=COLORS(share))
                axes.text(x, y, f"{100 * share:.0f}", **layout)
            axes.add_patch(mpl.patches.Rectangle((x - 0.48, y - 0.44), 0.96, 0.88, **cell))
    axes.set_xlim(-0.5, max(len(names), 6) - 0.5)
    axes.set_ylim(len(strips) - 0.5, -0.5)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _stack(
    figure: Figure, names: dict[str, list[str]], width: float, height: float, sharex: bool
) -> Iterator[Axes]:
    """Axes below each other, with the names at 0, 1, 2, ...; a strip is `height` inches."""
    nums = [len(of_panel) for of_panel in names.values()]
    figure.set_size_inches(width, 0.8 + 0.48 * len(nums) + height * sum(nums))
    ratios = [num + 0.2 for num in nums]
    all_axes = figure.subplots(len(nums), 1, sharex=sharex, squeeze=False, height_ratios=ratios)
    for axes, (title, of_panel) in zip(all_axes[:, 0], names.items(), strict=True):
        axes.set_yticks(range(len(of_panel)), [*map(escape_controls, of_panel)], fontsize=8)
        for label in axes.get_yticklabels():
            label.set_parse_math(False)
        axes.set_title(escape_controls(title), fontsize=10, parse_math=False)
        yield axes
