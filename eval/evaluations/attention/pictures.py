"""Attention weights as pictures: maps of layers by positions and by heads, and lines."""

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from kvalign.eval.drawing import INK, THEME, Series, draw, styles_of
from kvalign.eval.protocol import Document, Row
from kvalign.eval.protocol.tables import grouped, label_of
from kvalign.foundation.escape import escape_controls

EDGE = 4  # bins that are an entry each, at either end
BEFORE = "before any eviction"
SHADES = LogNorm(0.1, 100, clip=True)


def by_place(document: Document) -> Figure:
    """Two rows of maps for each cache size: layers by positions, the mean weight of an entry; and
    layers by heads, the share of the first four. A column is for before the eviction, or for a
    method after it.
    """
    groups = grouped(document["rows"], "cache_size")
    num_columns = 1 + max(map(len, groups.values()))
    with mpl.rc_context(THEME):
        size = (1.2 + 1.9 * num_columns, 0.6 + 4.2 * len(groups))
        figure = Figure(figsize=size, layout="constrained")
        all_axes = figure.subplots(2 * len(groups), num_columns, squeeze=False, sharey="row")
        for pair, (cache_size, rows) in enumerate(groups.items()):
            columns, pair_axes = _columns(rows), all_axes[2 * pair : 2 * pair + 2]
            for axes in pair_axes[:, len(columns) :].flat:
                axes.set_visible(False)
            for (title, maps), (top, bottom) in zip(columns.items(), pair_axes.T, strict=False):
                mesh = _map(top, maps["by_entry"], "entry")
                _name_places(top, len(maps["by_entry"][0]))
                _map(bottom, maps["by_head"], "head")
                phase = "" if title == BEFORE else "after: "
                top.set_title(escape_controls(phase + title), fontsize=8, parse_math=False)
            pair_axes[0, 0].set_ylabel(f"C = {cache_size}\nlayer (weight per entry)")
            pair_axes[1, 0].set_ylabel("layer (first four entries)")
        bar = figure.colorbar(mesh, ax=all_axes, aspect=40, pad=0.01, extend="min")
        assert bar.solids is not None
        bar.solids.set(rasterized=False, edgecolor="face")  # the report's page shows no images
        bar.set_label("attention, %")
        bar.set_ticks([0.1, 1, 10, 100], labels=["0.1", "1", "10", "100"])
    return figure


def by_layer(document: Document) -> Figure:
    """Share of the first four entries by layer, before and after, a panel for each cache size."""
    panels = {}
    for cache_size, rows in grouped(document["rows"], "cache_size").items():
        styles = {BEFORE: (INK, ".", "--")} | styles_of(rows)
        panels[f"C = {cache_size}"] = [
            Series(label, styles[label], [*range(1, len(shares) + 1)], shares)
            for label, maps in _columns(rows).items()
            for shares in [[float(np.mean(heads)) for heads in maps["by_head"]]]
        ]
    return draw(panels, x="layer", y="attention on the first four entries, %")


def _columns(rows: list[Row]) -> dict[str, Any]:
    """The maps before, the same for all methods, and after."""
    return {BEFORE: rows[0]["before"]} | {label_of(row): row["after"] for row in rows}


def _map(axes: Axes, shares: list[list[float]], x: str) -> Any:
    num_layers, num = len(shares), len(shares[0])
    style: dict[str, Any] = dict(cmap="viridis", edgecolors="face", linewidth=0.6)  # no gaps
    x_edges, y_edges = np.arange(num + 1), np.arange(num_layers + 1) + 0.5
    mesh = axes.pcolormesh(x_edges, y_edges, shares, norm=SHADES, **style)
    axes.yaxis.set_major_locator(mpl.ticker.MaxNLocator(6, integer=True))
    axes.set_xlabel(x, fontsize=8)
    axes.tick_params(labelsize=8)
    if x == "head":
        ticks = range(0, num, max(1, num // 4))
        axes.set_xticks([tick + 0.5 for tick in ticks], [f"{tick + 1}" for tick in ticks])
    return mesh


def _name_places(axes: Axes, num: int) -> None:
    names = {0.5: "1", EDGE - 0.5: f"{EDGE}", num - 0.5: "new"}
    axes.set_xticks([*names], [*names.values()])
