"""Attention of queries before any eviction and long after: does the model have attention sinks, and
what replaces them?

    before   the last steps of the first C + 1 tokens: nothing is evicted
    after    steps C tokens later: of the first input only a method's sinks are left

After Xiao et al. 2024 (StreamingLLM, figure 2); see docs/evaluation.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvalign.eval.protocol import Column, Document, Documents, Drawing, Evaluation, Row, Section
from kvalign.eval.protocol.document import measures
from kvalign.eval.protocol.settings import ComparisonSettings, plot_option
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import MOST_ITEMS, option

if TYPE_CHECKING:
    from kvalign.methods.base import Method
    from kvalign.models.loading import LoadedModel


@dataclass(frozen=True, kw_only=True)
class AttentionSettings(ComparisonSettings):
    """Show which entries receive attention, by layer, head and position: before any eviction, and
    when the sinks are evicted.

    Example:
        kvalign eval attention --cache-sizes 32 --num-texts 4
    """

    methods: tuple[str, ...] = option(
        ("window", "streaming-llm", "kvalign"),
        help="methods, comma-separated; the default leaves out those that lack an aligner",
    )
    corpus: str = option(
        "python-docs", help="text to read: python-docs, wikitext, hub:NAME, text:PATH, ..."
    )
    num_texts: int = option(
        16, help="pieces of the text, read side by side", at_least=2, at_most=MOST_ITEMS
    )
    num_steps: int = option(8, help="observed steps of each, before and after", at_least=1)
    plot: Path | None = plot_option("the weights as a picture")

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
    from kvalign.eval.evaluations.attention.weights import num_tokens, read_texts, row, watch
    from kvalign.eval.protocol.grid import one_by_one

    ids = read_texts(loaded, settings)
    num_each = max(settings.cache_sizes) + 2 * settings.num_steps
    for method, bar in one_by_one(methods, num_each, "steps"):
        start = time.perf_counter()
        texts = ids[:, : num_tokens(method.sizes.cache_size, settings.num_steps)]
        before, after = watch(method, texts, settings.num_steps, bar.update)
        yield row(method, before, after) | {"seconds": time.perf_counter() - start}


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
BY_LAYER = (
    "The share of the first four entries in each layer. A sink is a line far above the share "
    "of an even spread over all entries."
)


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

    @property
    def summary_columns(self) -> Mapping[str, Column]:
        return {"first_after": replace(COLUMNS["first_after"], title="on first entry, %")}

    def title(self, document: Document) -> str:
        settings = document["settings"]
        num = f"{settings['num_texts']} texts of {settings['corpus']}"
        return f"{super().title(document)}, {num}, {settings['num_steps']} queries each"

    def figure(self, document: Document) -> Drawing:
        from kvalign.eval.evaluations.attention.pictures import by_place

        caption = "Attention by layer and position, and of the first four by head: "
        return by_place(document), caption + self.title(document)

    def sections(self, documents: Documents) -> list[Section]:
        title = "Attention on the first entries"
        lines = Section.of(documents, title, BY_LAYER, self._by_layer, suffix="-layers")
        return [*super().sections(documents), lines]

    def _by_layer(self, document: Document) -> Drawing:
        from kvalign.eval.evaluations.attention.pictures import by_layer

        caption = f"Share of the first four entries, by layer: {self.title(document)}"
        return by_layer(document), caption


EVALUATION = Attention()
