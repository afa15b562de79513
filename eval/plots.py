"""Plots of results, as PNG or SVG by the file's ending."""

import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kvalign.files import write_whole

# Okabe and Ito's colours, told apart without red-green vision; a marker each, so that colour is
# not alone.
_STYLES = {
    "dense": ("#000000", "x"),
    "window": ("#999999", "v"),
    "streaming-llm": ("#D55E00", "s"),
    "recompute": ("#0072B2", "o"),
    "discard-half": ("#56B4E9", "D"),
    "table": ("#009E73", "^"),
    "table-kl": ("#000000", "*"),
    "network": ("#CC79A7", "P"),
    "anchored": ("#E69F00", "X"),
}


def plot_perplexity(result: dict[str, Any], path: Path) -> None:
    """Draw perplexity (log scale, lower is better) against cache size, a line a method.

    Args:
        result: of `kvalign.eval.perplexity.evaluate`.
        path: where to write, ending in .png or .svg.
    """
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"--plot takes a path ending in .png or .svg, got {str(path)!r}")
    rows, settings = result["rows"], result["settings"]
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for method, aligner in dict.fromkeys((row["method"], row["aligner"]) for row in rows):
        own = [row for row in rows if (row["method"], row["aligner"]) == (method, aligner)]
        color, marker = _STYLES.get(aligner or method, ("#000000", "*"))
        axes.plot(
            [row["cache_size"] for row in own],
            [row["perplexity"] for row in own],
            color=color,
            marker=marker,
            label=f"{method} ({aligner})" if aligner else method,
            zorder=3 if aligner else 2,  # in front of what it is compared with
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({row["cache_size"] for row in rows})
    axes.set_xticks(sizes, [str(size) for size in sizes], minor=False)
    axes.minorticks_off()
    ticks = _ticks(min(row["perplexity"] for row in rows), max(row["perplexity"] for row in rows))
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("cache size (entries)")
    axes.set_ylabel("perplexity (lower is better)")
    title = f"{settings['model']}, {rows[0]['num_labels']} labels of {settings['corpus']}"
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    write_whole(path, lambda partial: figure.savefig(partial, dpi=150))


def _ticks(low: float, high: float) -> list[float]:
    """Round values between the ends of a log axis, enough to read it by."""
    steps = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9]
    ticks = [
        step * 10**power
        for power in range(0, 8)
        for step in steps
        if low * 0.95 <= step * 10**power <= high * 1.05
    ]
    return ticks if len(ticks) <= 8 else ticks[:: math.ceil(len(ticks) / 8)]
