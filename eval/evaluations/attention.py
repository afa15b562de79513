"""Attention of queries before any eviction and long after: does the model have attention sinks, and
what replaces them?

    before   the last steps of the first C + 1 tokens: nothing is evicted
    after    steps C tokens later: of the first input only a method's sinks are left

After Xiao et al. 2024 (StreamingLLM, figure 2); see docs/evaluation.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvalign.eval.protocol import DrawnSettings, Evaluation, corpus_option
from kvalign.eval.protocol.data import Column, Document, Drawing, Row
from kvalign.eval.protocol.document import measures
from kvalign.eval.protocol.tables import grouped, label_of
from kvalign.foundation.errors import UserError, escape_controls
from kvalign.foundation.settings import MOST_ITEMS, option
from kvalign.foundation.statistics import mean_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from kvalign.methods.base import Method
    from kvalign.models.loading import LoadedModel


@dataclass(frozen=True, kw_only=True)
class AttentionSettings(DrawnSettings):
    """Show which entries receive attention, by layer, head and position: before any eviction, and
    when the sinks are evicted.

    Example:
        kvalign eval attention --cache-sizes 32 --num-texts 4
    """

    methods: tuple[str, ...] = option(
        ("window", "streaming-llm", "kvalign"),
        help="methods, comma-separated; the default leaves out those that lack an aligner",
    )
    corpus: str = corpus_option("text to read")
    num_texts: int = option(
        16, help="pieces of the text, read side by side", at_least=2, at_most=MOST_ITEMS
    )
    num_steps: int = option(8, help="observed steps of each, before and after", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        fewest = 22 + self.num_steps  # so that the first watched step fills the bins
        if min(self.cache_sizes) < fewest:
            raise UserError(
                f"--cache-sizes must be at least {fewest} for --num-steps {self.num_steps}, got "
                f"{min(self.cache_sizes)}: the first observed step must see 24 entries"
            )


@measures(AttentionSettings)
def attention(
    settings: AttentionSettings, loaded: LoadedModel, methods: list[Method]
) -> Iterable[Row]:
    """Let every method read the same texts, and average the attention of its queries.

    Returns:
        A document whose rows have the sizes, `COLUMNS` and their intervals (shares in %, means over
        texts, heads and the layers after the second), seconds, and `before` and `after`: by_entry,
        the mean weight of an entry in % for each layer and bin, heads together (bins: the first 4
        entries, 16 parts of those between, the latest 4), and by_head, the share of the first 4
        entries in % for each layer and head.

    Raises:
        UserError: a corpus shorter than the texts.
    """
    from kvalign.eval.protocol.grid import one_by_one, read_texts

    shape = settings.num_texts, num_tokens(max(settings.cache_sizes), settings.num_steps)
    ids = read_texts(loaded, settings.corpus, shape, "--num-texts or --cache-sizes")
    num_each = max(settings.cache_sizes) + 2 * settings.num_steps
    for method, bar in one_by_one(methods, num_each, "steps"):
        start = time.perf_counter()
        texts = ids[:, : num_tokens(method.sizes.cache_size, settings.num_steps)]
        before, after = watch(method, texts, settings.num_steps, bar.update)
        yield row(method, before, after) | {"seconds": time.perf_counter() - start}


EDGE = 4  # first entries, and latest, that have a bin each; StreamingLLM keeps as many sinks
NUM_MIDDLE = 16  # bins of those between
FEWEST = 2 * EDGE + NUM_MIDDLE  # entries that fill the bins
LOCAL_LAYERS = 2  # the first two of a model look at what is near (Xiao et al. 2024)


def num_tokens(cache_size: int, num_steps: int) -> int:
    """Tokens of a text that `watch` feeds."""
    return 2 * cache_size + 1 + num_steps


def watch(
    method: Method, ids: Tensor, num_steps: int, on_steps: Callable[[int], object] = lambda n: None
) -> tuple[Tensor, Tensor]:
    """Feed ids [B, 2 C + 1 + num_steps]. Observe the last steps before any eviction, which end with
    C + 1 entries, and the last of all, when everything but the sinks has been evicted. UserError
    for too many tokens for a method that does not evict.

    Returns:
        Weights before and after: [B, L, H, bins] float64, means over `num_steps` steps of the mean
            weight of an entry in each bin (`in_bins`).
    """
    from kvalign.methods.as_encoded import Reencoding

    method = readable(method)
    method.reset()
    size = method.sizes.cache_size
    first, ours, between, last = ids.split([size + 1 - num_steps, num_steps, size, num_steps], 1)
    method.feed(first)
    before = _step(method, ours, on_steps)
    for part in between.split(size if isinstance(method, Reencoding) else 1, 1):
        method.feed(part)
        on_steps(part.shape[1])
    return before, _step(method, last, on_steps)


def _step(method: Method, ids: Tensor, on_steps: Callable[[int], object]) -> Tensor:
    """The mean over steps, one a token of ids [B, T]."""
    import torch

    total = torch.zeros((), dtype=torch.float64)
    with watched(method.model) as weights:
        for one in ids.split(1, 1):
            method.feed(one)
            total = total + in_bins(_by_time(method, torch.stack(weights, 1)))
            weights.clear()
            on_steps(1)
    return total / ids.shape[1]


def _by_time(method: Method, weights: Tensor) -> Tensor:
    """Weights [B, L, H, S] of the last step in the order of time: a ring is read as it lies."""
    from kvalign.aligners.entries import KV
    from kvalign.invariants.stream import by_time
    from kvalign.methods.cached import Cached

    step = method.cache.last_step if isinstance(method, Cached) else None
    if step is None:
        return weights
    slots = weights.flatten(1, 2)[..., None]
    return by_time(step, KV(slots, slots)).keys[..., 0].unflatten(1, weights.shape[1:3])


def in_bins(weights: Tensor) -> Tensor:
    """Weights [..., S], S >= FEWEST, as means over bins [..., FEWEST]: the first and the last
    `EDGE` entries have one bin each, those between share `NUM_MIDDLE` bins of equal width.
    """
    import torch

    weights = weights.double().cpu()
    middle = weights[..., EDGE:-EDGE].tensor_split(NUM_MIDDLE, -1)
    means = torch.stack([part.mean(-1) for part in middle], -1)
    return torch.cat([weights[..., :EDGE], means, weights[..., -EDGE:]], -1)


@contextmanager
def watched(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Context in which each pass of the model appends the weights of its last query to the list:
    [B, H, S] a layer. transformers' own eager attention computes them; a hook keeps only those of
    the last query, so the full weights of only one layer exist at a time.
    """
    weights: list[Tensor] = []
    config, name = model.config, model.config._attn_implementation

    def keep(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
        weights.append(output[1][:, :, -1])

    named = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    inner = {part for module in named for part in module.modules() if part is not module}
    outer = [module for module in named if module not in inner]  # GPT-Neo has one in another
    assert len(outer) == model.config.num_hidden_layers
    handles = [module.register_forward_hook(keep) for module in outer]
    config._attn_implementation = "eager"  # the others return no weights
    try:
        yield weights
    finally:
        config._attn_implementation = name
        for handle in handles:
            handle.remove()


def readable(method: Method) -> Method:
    """Method whose entries are written where the model's own attention reads them."""
    from kvalign.cache.realigner import OnRead
    from kvalign.methods.cached import Cached

    if isinstance(method, Cached) and isinstance(method.cache.realigner, OnRead):
        method.places_by, method.is_exact = method.cache.realigner.moving, False
        method.cache = method.new_cache()  # an empty one survives a reset
    return method


def row(method: Method, before: Tensor, after: Tensor) -> Row:
    """The row of a method, from weights [B, L, H, bins]."""
    from kvalign.eval.protocol.grid import sizes_of

    phases = {"before": before, "after": after}
    figures: Row = sizes_of(method)
    for part, bins in {"first": [0], "four": range(EDGE), "latest": range(-EDGE, 0)}.items():
        for phase, weights in phases.items():
            layers = weights[:, LOCAL_LAYERS:] if weights.shape[1] > LOCAL_LAYERS else weights
            shares = 100 * layers[..., list(bins)].sum(-1).mean((1, 2))  # [B]
            low, high = mean_interval(shares)
            name = f"{part}_{phase}"
            figures |= {name: shares.mean().item(), f"{name}_low": low, f"{name}_high": high}
    for phase, weights in phases.items():  # what the pictures show
        mean = 100 * weights.mean(0)  # [L, H, bins]
        by_entry, by_head = mean.mean(1), mean[..., :EDGE].sum(-1)
        figures[phase] = {"by_entry": _short(by_entry), "by_head": _short(by_head)}
    return figures


def _short(shares: Tensor) -> list[list[float]]:
    """Four digits of each: a document holds thousands."""
    return [[float(f"{value:.4g}") for value in line] for line in shares.tolist()]


LAYERS = "% of the attention of the layers after the second; 95 % over texts"


COLUMNS = {
    name: Column(title, 1, "", LAYERS, ends=(f"{name}_low", f"{name}_high"))
    for name, title in (
        ("first_before", "first entry, before"),
        ("first_after", "after"),
        ("four_before", "first four, before"),
        ("four_after", "after"),
        ("latest_before", "latest four, before"),
        ("latest_after", "after"),
    )
}
BEFORE = "before any eviction"


class Attention(Evaluation):
    settings = AttentionSettings
    run = staticmethod(attention)
    heading = "Attention"
    about = (
        "Mean attention weights over texts, before any eviction, and after everything but a "
        "method's sinks has been evicted. The first entry of a window is its oldest. Models "
        "that need attention sinks (Xiao et al. 2024) have a bright left edge before the "
        "eviction."
    )
    columns = COLUMNS

    def title(self, document: Document) -> str:
        settings = document["settings"]
        num = f"{settings['num_texts']} texts of {settings['corpus']}"
        return f"{super().title(document)}, {num}, {settings['num_steps']} queries each"

    def figure(self, document: Document) -> Drawing:
        caption = "Attention by layer and position, and of the first four by head: "
        return by_place(document), caption + self.title(document)


def by_place(document: Document) -> Figure:
    """Two rows of maps for each cache size: layers by positions, the mean weight of an entry; and
    layers by heads, the share of the first four. A column is for before the eviction, or for a
    method after it.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from kvalign.eval.drawing import THEME

    groups = grouped(document["rows"], "cache_size")
    num_columns = 1 + max(map(len, groups.values()))
    with mpl.rc_context(THEME):
        size = (1.2 + 1.9 * num_columns, 0.6 + 4.2 * len(groups))
        figure = Figure(figsize=size, layout="constrained")
        all_axes = figure.subplots(2 * len(groups), num_columns, squeeze=False, sharey="row")
        for pair, (cache_size, rows) in enumerate(groups.items()):
            columns = {BEFORE: rows[0]["before"]}  # the same of all methods
            columns |= {label_of(row): row["after"] for row in rows}
            pair_axes = all_axes[2 * pair : 2 * pair + 2]
            for axes in pair_axes[:, len(columns) :].flat:
                axes.set_visible(False)
            for (title, maps), (top, bottom) in zip(columns.items(), pair_axes.T, strict=False):
                mesh = _map(top, maps["by_entry"], "entry")
                last = len(maps["by_entry"][0]) - 0.5
                names = {0.5: "1", EDGE - 0.5: f"{EDGE}", last: "new"}
                top.set_xticks([*names], [*names.values()])
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


def _map(axes: Axes, shares: list[list[float]], x: str) -> Any:
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    num_layers, num = len(shares), len(shares[0])
    style: dict[str, Any] = dict(cmap="viridis", edgecolors="face", linewidth=0.6)  # no gaps
    x_edges, y_edges = np.arange(num + 1), np.arange(num_layers + 1) + 0.5
    mesh = axes.pcolormesh(x_edges, y_edges, shares, norm=LogNorm(0.1, 100, clip=True), **style)
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel(x, fontsize=8)
    axes.tick_params(labelsize=8)
    if x == "head":
        ticks = range(0, num, max(1, num // 4))
        axes.set_xticks([tick + 0.5 for tick in ticks], [f"{tick + 1}" for tick in ticks])
    return mesh


EVALUATION = Attention()
