"""Figures of results: drawn once, saved as PNG and SVG, inserted into pages. They are lines, or
strips: of chunks, as in the paper's figures 5 and 6, or of shares in %, as a heat map.
"""

import io
import itertools
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from pandas import DataFrame

from kvalign.eval.protocol.data import FLOOR, PEER, Row
from kvalign.eval.protocol.tables import grouped, label_of
from kvalign.foundation.errors import escape_controls
from kvalign.foundation.files import write_whole

INK = "#1b1f24"
THEME: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "kvalign", "font.size": 10}
THEME |= dict.fromkeys(
    ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
)

# After Okabe and Ito's colours, told apart without red-green vision, and at least 3:1 against
# white and against near black; a marker each, so that colour is not alone.
_STYLES = {
    FLOOR: (INK, "_"),
    "dense": (INK, "x"),
    "window": ("#808080", "v"),
    "streaming-llm": ("#D55E00", "s"),
    "recompute": ("#1F83C4", "o"),
    "discard-half": ("#7B61C9", "D"),
    "table": ("#009E73", "^"),
    "table-kl": (INK, "*"),
    "network": ("#C46A9C", "P"),
    PEER: ("#D1495B", ">"),
}
_OWN = "#A66A00", "."  # of a method or kind that is not ours
_OTHER_MARKERS = "hp<>d8H1234"  # of further lines of one method or kind, which share its colour
_OTHER_DASHES = ((0, (6, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))  # the floor alone is "--"

Style = tuple[str, str, Any]  # colour, marker, line style


@dataclass(frozen=True)
class Series:
    """Line of one method: values at x, with the ends of its whiskers, of which a floor has none."""

    label: str
    style: Style
    x: list[float]
    y: list[float]
    high: list[float] | None = None
    low: list[float] | None = None
    is_floor: bool = False


def series(
    rows: Iterable[Row],
    x: str,
    y: str,
    high: str | None = None,
    styles: Mapping[str, Style] | None = None,
    low: str | None = None,
) -> list[Series]:
    """Line for each method of two columns of its rows, in the styles given by label; `high` and
    `low` are columns with the ends of whiskers.
    """
    rows, lines = list(rows), []
    styles = styles_of(rows) if styles is None else styles
    for label, group in grouped(rows, label_of).items():
        is_floor = group[0]["method"] == FLOOR
        names = (x, y, None, None) if is_floor else (x, y, high, low)
        columns: list[Any] = [name and [row[name] for row in group] for name in names]
        x_values, y_values, ends, starts = columns
        lines.append(Series(label, styles[label], x_values, y_values, ends, starts, is_floor))
    return lines


def perplexities(rows: Iterable[Row], x: str) -> list[Series]:
    """Lines of perplexities over a column, with whiskers unless there are too few labels. Whiskers
    are the 95 % interval of the ratio to the reference, which compares methods, or else of the
    perplexity.
    """
    spanned = []
    for row in rows:
        y, low, high, scale = row["perplexity"], row["low"], row["high"], 1.0
        if "ratio_low" in row:
            low, high, scale = row["ratio_low"], row["ratio_high"], y / row["ratio"]
        low, high = (y, y) if high is None else (scale * low, scale * high)
        spanned.append(row | {"low": low, "high": high})
    return series(spanned, x, "perplexity", "high", low="low")


def panels_by(
    name: str,
    rows: Iterable[Row],
    title: str,
    x: str,
    y: str,
    high: str | None = None,
    low: str | None = None,
) -> dict[str, list[Series]]:
    """Lines in a panel for each value of a column, which ends the panel's title."""
    rows = list(rows)
    styles, groups = styles_of(rows), grouped(rows, name)
    return {f"{title}{v}": series(group, x, y, high, styles, low) for v, group in groups.items()}


def styles_of(rows: Iterable[Row]) -> dict[str, Style]:
    """Style of each line by its label, from its method or its aligner's kind. A second line of
    these has another marker, and dashes.
    """
    styles: dict[str, Style] = {}
    counts, markers = Counter[tuple[str, str]](), itertools.cycle(_OTHER_MARKERS)
    for label, (row, *_) in grouped(rows, label_of).items():
        name = row.get("aligner_label") or row["aligner"] or row["method"]
        name = name.partition(": ")[0]
        names = (name, name.partition("-every-")[0], name.partition("-")[0])
        color, marker = first = next((_STYLES[n] for n in names if n in _STYLES), _OWN)
        dashes = ["--" if row["method"] == FLOOR else "-", *_OTHER_DASHES]
        again = counts[first]
        styles[label] = color, next(markers) if again else marker, dashes[again % len(dashes)]
        counts[first] += 1
    return styles


def draw(
    panels: dict[str, list[Series]],
    *,
    x: str,
    y: str,
    doubling_x: bool = False,
    log_x: bool = False,
    log_y: bool = False,
    names: Sequence[str] = (),
    size: tuple[float, float] | None = None,
) -> Figure:
    """Lines in one panel or several side by side, which share the y axis and one legend.

    Args:
        panels: by their titles.
        x, y: labels of the axes.
        doubling_x: log axis of base 2 with ticks at the points that double.
        log_x, log_y: log axes with ticks at round values.
        names: labels at x = 0, 1, 2, ... if x has no numbers.
        size: width and height in inches; None: by the number of panels.
    """
    with mpl.rc_context(THEME):
        num = len(panels)
        size = size or (max(6.4, 3.0 * num), 4.4)
        figure = Figure(figsize=size, layout="constrained")
        all_axes = figure.subplots(1, num, sharey=True, squeeze=False)[0]
        for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
            x_values = [v for line in lines for v in line.x]
            for number, line in enumerate(lines):
                shift = 1.012 ** (number - (len(lines) - 1) / 2)  # so that whiskers do not cover
                is_apart = doubling_x and (line.low or len(set(x_values)) == 1)
                _draw_line(axes, line, shift if is_apart else 1.0)
            if doubling_x:
                _double(axes, x_values)
            elif log_x:
                axes.set_xscale("log")
                _round_ticks(axes.xaxis, x_values)
            if names:
                axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
            axes.set_title(escape_controls(title), fontsize=10, parse_math=False)
            axes.set_xlabel(x)
            axes.grid(alpha=0.25)
        if log_y:
            all_axes[0].set_yscale("log")
            all_lines = itertools.chain(*panels.values())
            y_values = [v for line in all_lines for v in (*line.y, *(line.high or ()))]
            _round_ticks(all_axes[0].yaxis, y_values)
        all_axes[0].set_ylabel(y)
        _legend_below(figure, all_axes)
    return figure


def _legend_below(figure: Figure, all_axes: Iterable[Axes]) -> None:
    """One legend of all axes, in as many columns as fit."""
    legends = itertools.chain(*(axes.get_legend_handles_labels()[0] for axes in all_axes))
    handles = {str(handle.get_label()): handle for handle in legends}
    longest = max(map(len, handles), default=0) + 6  # with its line
    num_columns = max(1, min(3, int(16 * figure.get_figwidth() / longest)))
    layout: dict[str, Any] = dict(loc="outside lower center", ncols=num_columns)
    figure.legend(handles.values(), handles.keys(), fontsize=8, frameon=False, **layout)


FAR_ABOVE = 1.12  # times the lowest perplexity: what is higher stands at the upper edge


def draw_frontier(panels: dict[str, list[Row]], size: tuple[float, float] | None = None) -> Figure:
    """Perplexity against the mean time of a token of rows of `eval frontier`, in panels by title,
    three in a row at most. What is on the frontier has a ring, a dotted one if it is perhaps, and
    is joined by a line. Bars are of the time and of the ratio to the best that is not slower. What
    lies far above stands at the upper edge with its figure, and `dense` is a line.
    """
    styles = styles_of(row for rows in panels.values() for row in rows)
    with mpl.rc_context(THEME):
        num_rows = math.ceil(len(panels) / 3)
        across = math.ceil(len(panels) / num_rows)
        size = size or (max(6.4, 4.4 * across), 1.4 + 3.6 * num_rows)
        figure = Figure(figsize=size, layout="constrained")
        all_axes = [figure.add_subplot(num_rows, across, i + 1) for i in range(len(panels))]
        for axes, (title, rows) in zip(all_axes, panels.items(), strict=True):
            top = FAR_ABOVE * min(row["perplexity"] for row in rows)
            for row in rows:
                y, label = row["perplexity"], label_of(row)
                color, marker, _ = styles[label]
                if row["mean_ms"] is None:
                    axes.axhline(y, color=color, linestyle=":", label=label)
                    continue
                x, shown = row["mean_ms"], min(y, top)
                if y > top:
                    place: dict[str, Any] = dict(textcoords="offset points", xytext=(0, -14))
                    axes.annotate(f"{y:.0f} \u2191", (x, top), ha="center", fontsize=8, **place)
                beside = [[x - row["ms_low"]], [row["ms_high"] - x]]
                up = None
                if row["ratio_high"] and y <= top:
                    base = y / row["ratio"]
                    up = [[y - base * row["ratio_low"]], [base * row["ratio_high"] - y]]
                how: dict[str, Any] = dict(color=color, marker=marker, elinewidth=1, linestyle="")
                axes.errorbar(x, shown, up, beside, label=label, **how)
                if row["frontier"]:
                    ring: dict[str, Any] = dict(s=190, facecolors="none", edgecolors=INK)
                    axes.scatter(
                        x, shown, linestyle="-" if row["frontier"] == "yes" else ":", **ring
                    )
            best = sorted((r["mean_ms"], min(r["perplexity"], top)) for r in rows if r["frontier"])
            axes.step(*zip(*best, strict=True), where="post", color=INK, linewidth=0.8, zorder=1)
            axes.set_xscale("log")
            _round_ticks(axes.xaxis, [row["mean_ms"] for row in rows if row["mean_ms"]])
            axes.set_title(escape_controls(title), fontsize=10, parse_math=False)
            axes.set_xlabel("ms a token (log)")
            axes.grid(alpha=0.25)
        for axes in all_axes[::across]:
            axes.set_ylabel("perplexity (lower is better)")
        _legend_below(figure, all_axes)
    return figure


def draw_bars(
    rows: Sequence[Row], key: str, x: str, *, mark: str = "", size: tuple[float, float]
) -> Figure:
    """A bar for each row in the colour of its method, with its figure, and a mark at another."""
    styles = styles_of(rows)
    with mpl.rc_context(THEME):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        for number, row in enumerate(rows):
            color = styles[label_of(row)][0]
            axes.barh(number, row[key], color=color, height=0.6)
            place: dict[str, Any] = dict(textcoords="offset points", xytext=(3, 0), va="center")
            axes.annotate(f"{row[key]:.3g}", (row[key], number), fontsize=8, **place)
            if mark:
                axes.plot(row[mark], number, "|", color=INK, markersize=14)
        axes.set_yticks(
            range(len(rows)), [escape_controls(label_of(row)) for row in rows], fontsize=8
        )
        axes.set_xlim(0, 1.18 * max(row[key] for row in rows) or 1.0)
        axes.invert_yaxis()
        axes.set_xlabel(x)
        axes.grid(axis="x", alpha=0.25)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure on white, as PNG or SVG by the path's ending."""
    with mpl.rc_context(THEME), _any_glyph():
        undated = {"Date": None} if path.suffix == ".svg" else {}
        write_whole(path, lambda partial: figure.savefig(partial, dpi=150, metadata=undated))


def inline_svg(figure: Figure, name: str) -> str:
    """Figure as an <svg> element, in the colour of the surrounding text. Its name is unique on the
    page, so that no two elements have one id.
    """
    buffer = io.StringIO()
    with mpl.rc_context(THEME | {"svg.hashsalt": name}), _any_glyph():
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    source = buffer.getvalue()
    source = source[source.index("<svg") :].replace(INK.lower(), "currentColor")
    source = re.sub(r"<metadata>.*?</metadata>", "", source, flags=re.DOTALL)
    source = re.sub(r' id="legend_\d+"', ' class="plot-legend"', source)
    return re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", source)


def inline_legend(figure: Figure, name: str) -> str:
    """Legend of a figure alone, one entry per line, in the form of `inline_svg`. A narrow page
    shows it at full size. Empty without a legend.
    """
    labels = [text.get_text() for one in figure.legends[:1] for text in one.get_texts()]
    if not labels:
        return ""
    handles = [one for one in figure.legends[0].legend_handles if one is not None]
    with mpl.rc_context(THEME):
        alone = Figure(figsize=(0.6 + 0.075 * max(map(len, labels)), 0.1 + 0.19 * len(labels)))
        how: dict[str, Any] = dict(loc="center left", fontsize=8, frameon=False, borderpad=0)
        alone.legend(handles, labels, **how)
    return inline_svg(alone, f"{name}-legend")


def _draw_line(axes: Axes, line: Series, shift: float) -> None:
    style: dict[str, Any] = dict(zip(("color", "marker", "linestyle"), line.style, strict=True))
    compared = 3 if "(" in line.label else 2  # before what it is compared with
    style |= dict(zorder=1.5 if line.is_floor else compared)
    x = [shift * value for value in line.x]
    up = [max(0.0, h - v) for h, v in zip(line.high or line.y, line.y, strict=True)]
    down = [max(0.0, v - low) for v, low in zip(line.y, line.low or line.y, strict=True)]
    reach = None if line.high is None else [down, up]
    axes.errorbar(x, line.y, reach, label="_", capsize=3, elinewidth=1, **style)
    axes.plot([], [], label=line.label, **style)  # in the legend, without whiskers


def _double(axes: Axes, x: list[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    ticks = {v for v in x if math.log2(v).is_integer()}
    ticks |= {255.0} & set(x)  # the largest cache of GPT-2's kin: 256 less the new token
    if len(ticks) < 3:
        ticks |= {min(x), max(x), round(math.sqrt(min(x) * max(x)))}
    axes.set_xticks(sorted(ticks), [f"{value:.6g}" for value in sorted(ticks)], minor=False)


def _round_ticks(axis: Axis, values: list[float]) -> None:
    """Three to about nine ticks at round values of a log axis; those of a narrow one are even."""
    low, high = 0.97 * min(values), 1.03 * max(values)
    even, by_decades = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]), LogLocator(subs=(1.0, 2.0, 5.0))
    locator = by_decades if high > 10 * low else even
    ticks = [tick for tick in locator.tick_values(low, high) if low <= tick <= high]
    ticks = ticks[:: math.ceil(len(ticks) / 9)]
    axis.set_ticks(ticks, labels=[f"{tick:.6g}" for tick in ticks])
    axis.set_minor_locator(NullLocator())


@contextmanager
def _any_glyph() -> Iterator[None]:
    """A model's name may have letters that the font of the plots has not: boxes, no complaint."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


GOOD, BAD = "#2da06b", "#d1495b"
COLORS = LinearSegmentedColormap.from_list("readable", ["#efdcc0", "#bfe3d0", "#3fb27f"])
TEXT = "#14181d"  # 7:1 and more on each of these


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
                start = 0
                for is_readable, run in itertools.groupby(row["chunks"], itemgetter(4)):
                    color, high = (GOOD, 0.8) if is_readable else (BAD, 0.4)
                    place = (start, num := len(list(run)))  # neighbours that are alike are one
                    axes.broken_barh([place], (number + 0.4 - high, high), facecolor=color)
                    start += num
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


def draw_shares(panels: dict[str, DataFrame], x: str) -> Figure:
    """Shares in %, in panels by title: lines by their labels, and columns by what they are of. A
    dash is what could not be tried.
    """
    names = {title: [*shares.index] for title, shares in panels.items()}
    with mpl.rc_context(THEME):
        figure = Figure(layout="constrained")
        all_axes = _stack(figure, names, 7.6, 0.36, sharex=False)
        for axes, shares in zip(all_axes, panels.values(), strict=True):
            values = shares.to_numpy(float)
            places: list[Any] = [np.arange(num + 1) - 0.5 for num in values.shape[::-1]]
            style: dict[str, Any] = dict(cmap=COLORS, vmin=0, vmax=1, edgecolors="w", linewidth=2)
            axes.pcolormesh(*places, values, **style)
            for (row, column), share in np.ndenumerate(values):
                text = "-" if np.isnan(share) else f"{100 * share:.0f}"
                axes.text(column, row, text, ha="center", va="center", color=TEXT, fontsize=8)
            axes.invert_yaxis()
            axes.set_xticks(range(shares.shape[1]), map(str, shares.columns), fontsize=8)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
        axes.set_xlabel(x)
    return figure


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
