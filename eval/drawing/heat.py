"""What many rows have one after another, as a strip of numbers for each method: a line for each
would be a tangle.
"""

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from kvalign.eval.drawing.plots import THEME
from kvalign.eval.protocol.evaluation import Row
from kvalign.eval.protocol.tables import grouped, label_of
from kvalign.foundation.escape import escape_controls

COLORS = LinearSegmentedColormap.from_list("readable", ["#f7f4ee", "#bfe3d0", "#3fb27f"])
TEXT = "#14181d"  # 7:1 and more on each of these
MAX_CELLS = 16  # of a strip; more answers are put together


def draw_heat(panels: dict[str, list[Row]]) -> Figure:
    """Strips of the answers' readable share in %, a method each, in panels by title."""
    strips = {title: _strips(rows) for title, rows in panels.items()}
    nums = [len(rows) for rows, _ in strips.values()]
    with mpl.rc_context(THEME):
        size = (7.6, 0.7 + 0.5 * len(nums) + 0.36 * sum(nums))
        figure = Figure(figsize=size, layout="constrained")
        ratios = [num + 0.2 for num in nums]
        all_axes = figure.subplots(len(nums), 1, squeeze=False, height_ratios=ratios)[:, 0]
        for axes, (title, (shares, names)) in zip(all_axes, strips.items(), strict=True):
            _draw(axes, list(shares.values()), names)
            places = [number + 0.5 for number in range(len(shares))]
            axes.set_yticks(places, [*map(escape_controls, shares)], fontsize=8)
            for label in axes.get_yticklabels():
                label.set_parse_math(False)
            axes.set_title(escape_controls(title), fontsize=10, parse_math=False)
        all_axes[-1].set_xlabel("answer")
    return figure


def _strips(rows: list[Row]) -> tuple[dict[str, list[float]], list[str]]:
    """The shares of each method, means of neighbours if there are many, and what they are of."""
    groups = grouped(rows, label_of)
    num = max(map(len, groups.values()))
    cells = np.array_split(np.arange(num), min(num, MAX_CELLS))
    names = [f"{c[0] + 1}" if len(c) == 1 else f"{c[0] + 1}-{c[-1] + 1}" for c in cells]
    shares = {
        label: [float(np.mean([group[i]["readable"] for i in cell])) for cell in cells]
        for label, group in groups.items()
    }
    return shares, names


def _draw(axes: Axes, strips: list[list[float]], names: list[str]) -> None:
    place: dict[str, Any] = dict(ha="center", va="center", color=TEXT, fontsize=8)
    for y, strip in enumerate(strips):
        for x, share in enumerate(strip):
            cell = mpl.patches.Rectangle((x + 0.02, y + 0.06), 0.96, 0.88, color=COLORS(share))
            axes.add_patch(cell)
            axes.text(x + 0.5, y + 0.5, f"{100 * share:.0f}", **place)
    axes.set_xlim(0, max(len(names), 6))
    axes.set_ylim(0, len(strips))
    axes.set_xticks([x + 0.5 for x in range(len(names))], names, fontsize=8)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
