"""Perplexity of streaming methods, by one protocol for all.

    ids     0 1 ... C | C+1 C+2 ... C+num_tokens
            first input  labels, one at a time

exp(mean NLL) over the labels; at one cache size every method is scored on the same ones. A method
scores a text step by step, or by a faster way with the same result: a batch of windows at once
where it re-encodes clean windows anyway (`recompute`, `discard-half`), whole segments in the
relative form where its realignment starts from birth (`window`, `streaming-llm`, `kvalign` with a
table). So `seconds` is the harness's time and no measure of a method's speed, unless every method
was made to step (`--stepwise`); `kvalign eval latency` measures it best.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvalign.errors import UserError
from kvalign.eval.evaluation import Column, Document, Documents, Evaluation, Plot, Section
from kvalign.eval.settings import ComparisonSettings
from kvalign.settings import keywords_of, option

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvalign.models import LoadedModel


@dataclass(frozen=True, kw_only=True)
class PerplexitySettings(ComparisonSettings):
    """Compare methods on perplexity: the same labels for each at every cache size, lower is better.

    Example:
        kvalign eval perplexity --methods kvalign,recompute --cache-sizes 32 --num-tokens 100
    """

    corpus: str = option(
        "python-docs", help="text to score: python-docs, wikitext, hub:NAME, text:PATH, ..."
    )
    num_tokens: int = option(2000, help="labels to score", at_least=1)
    reference: str | None = option(
        None, help="method to give each row's ratio to, with its 95 % interval"
    )
    keep: Path | None = option(
        None, help="folder that keeps the loss of each token (Parquet); what it has is not rerun"
    )
    stepwise: bool = option(
        False, help="one step a token even where a faster way gives the same figures"
    )
    plot: Path | None = option(None, help="also draw perplexity against cache size (.png or .svg)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference and self.reference not in self.methods:
            raise UserError(f"--reference {self.reference} is not among --methods")
        if self.plot and self.plot.suffix not in (".png", ".svg"):
            raise UserError(f"--plot takes a path ending in .png or .svg, got {str(self.plot)!r}")


@keywords_of(PerplexitySettings)
def perplexity(settings: PerplexitySettings, *, loaded: LoadedModel | None = None) -> Document:
    """Score every method at every cache size and number evicted.

    Args:
        loaded: in place of the model that the settings name.

    Returns:
        A document whose rows have method, aligner (kind and objective; None for methods without
        one), cache_size, num_sinks, num_evicted, num_labels, nll_nats (mean a label), perplexity,
        low, high (its 95 % interval), quarters (perplexity of each quarter of the labels),
        segments (see `kvalign.eval.statistics.by_segment`), seconds; and with a reference: ratio
        (perplexity by that of the reference at the same cache size and number evicted, on the same
        labels), ratio_low, ratio_high, drift (how the ratio changed from the first quarter of the
        labels to the last, 1: not) and the ratio of each segment.

    Raises:
        UserError: wrong settings, or a corpus shorter than the largest cache and the labels;
            before any work.
    """
    from kvalign.eval.document import document
    from kvalign.eval.grid import load, make_grid
    from kvalign.eval.loss_store import LossStore
    from kvalign.eval.perplexity_scores import read_ids, score_methods

    started = time.perf_counter()
    settings, loaded = load(settings, loaded)
    methods = make_grid(settings, loaded.model)
    longest = max(settings.cache_sizes) + 1 + settings.num_tokens
    rows = score_methods(
        methods,
        read_ids(loaded, settings.corpus, longest),
        settings.num_tokens,
        stepwise=settings.stepwise,
        reference=settings.reference,
        store=LossStore(settings.keep),
    )
    result = document("eval perplexity", settings, rows, started=started)
    if settings.plot:
        from kvalign.eval.plots import save

        save(_by_size(result), settings.plot)
    return result


COLUMNS = {
    "num_labels": Column("labels"),
    "perplexity": Column("perplexity", 2, "lower", "exp of the mean loss of the labels"),
    "low": Column("95 % from", 2, about="block bootstrap over the labels"),
    "high": Column("95 % to", 2, about="block bootstrap over the labels"),
    "ratio": Column("ratio", 3, "lower", "by the reference's, on the same labels", True),
    "ratio_low": Column("ratio from", 3, "", "95 %, paired block bootstrap", True),
    "ratio_high": Column("ratio to", 3, "", "95 %, paired block bootstrap", True),
    "drift": Column("drift", 3, "", "ratio in the last quarter by the first's", True),
}
NLL = Column("NLL, nats", 4, "lower", "mean loss of a label")
TIME = Column("total s", 1, "lower", "time of the whole run")


class Perplexity(Evaluation):
    settings = PerplexitySettings
    run = staticmethod(perplexity)
    heading = "Perplexity"
    about = (
        "exp(mean loss) over the same labels for every method at one cache size, after a first "
        "input of C + 1 tokens. The 95 % interval comes from a block bootstrap. Compare rows of "
        "equal sinks: recompute and window keep none unless asked to."
    )
    in_summary = ("perplexity", "ratio", "drift")
    columns = COLUMNS
    more_columns = (("nll_nats", NLL), ("seconds", TIME))
    row_fields = (("segments", list[dict[str, float]]),)
    settings_read = ("corpus", "reference", "stepwise")

    def chosen(self, documents: Documents) -> Documents:
        """Less those that stepped through a text for their times alone, while another scored more
        of it.
        """
        settings = {name: document["settings"] for name, document in documents.items()}
        scored = {(s["model"], s["corpus"]) for s in settings.values() if not s["stepwise"]}
        return {
            name: documents[name]
            for name, s in settings.items()
            if not s["stepwise"] or (s["model"], s["corpus"]) not in scored
        }

    def title(self, document: Document) -> str:
        num_labels = document["rows"][0]["num_labels"]
        return f"{super().title(document)}, {num_labels} labels of {document['settings']['corpus']}"

    def figure(self, document: Document) -> tuple[Figure, str] | None:
        if len({row["cache_size"] for row in document["rows"]}) == 1:
            return None
        return _by_size(document), f"Perplexity against cache size: {self.title(document)}"

    def sections(self, documents: Documents) -> list[Section]:
        chosen = self.chosen(documents)
        stepped = {n: d for n, d in documents.items() if d["settings"]["stepwise"]}
        return [*super().sections(chosen), self._drift(chosen), self._total_time(stepped)]

    def _drift(self, documents: Documents) -> Section:
        from kvalign.eval.plots import draw, series
        from kvalign.eval.rows import grouped

        section = Section(
            "Drift",
            "The same perplexity as the stream goes on, in units of the cache size since the cache "
            "filled; by the reference's on the same labels where there is one, which takes the "
            "text's own ups and downs out. A line that climbs compounds an error.",
            list(documents),
        )
        for name, document in documents.items():
            settings = document["settings"]
            reference = settings["reference"]
            y = f"perplexity by {reference}'s" if reference else "perplexity"
            panels = {}
            for cache_size, rows in grouped(document["rows"], "cache_size").items():
                if len(rows[0]["segments"]) > 1:
                    points = [
                        row | {"end": segment["end"], "y": segment[_judged(document)]}
                        for row in rows
                        for segment in row["segments"]
                    ]
                    panels[f"C = {cache_size}"] = series(points, "end", "y")
            if panels:
                x = "cache sizes since it filled"
                drawn = draw(panels, x=x, y=y, doubling_x=True, log_y=True)
                caption = f"{y} as the stream goes on: {settings['model']}, {settings['corpus']}"
                section.plots.append(Plot(f"{name}-drift", drawn, caption))
        return section

    def _total_time(self, documents: Documents) -> Section:
        from kvalign.eval.plots import draw, series
        from kvalign.eval.tables import tables_by_cache

        section = Section(
            "Perplexity against total time",
            "Every method made to step token by token, as it does when it generates (the paper's "
            "figure 3); a point is one cache size. To the lower left is better.",
            list(documents),
        )
        columns = {"perplexity": COLUMNS["perplexity"], "seconds": TIME}
        for name, document in documents.items():
            title = self.title(document)
            figure = draw(
                {title: series(document["rows"], "seconds", "perplexity")},
                x="total time, s",
                y="perplexity (lower is better)",
                log_x=True,
                log_y=True,
            )
            section.plots.append(Plot(name, figure, f"Perplexity against total time: {title}"))
            section.tables.extend(tables_by_cache(title, document["rows"], columns))
        return section

    def check(self, document: Document) -> None:
        needed = {"end", _judged(document)}
        for row in document["rows"]:
            if not row["segments"] or any(needed - segment.keys() for segment in row["segments"]):
                raise UserError(f"rows.segments: each needs {' and '.join(sorted(needed))}")


def _judged(document: Document) -> str:
    """What tells of drift: the ratio where there is a reference."""
    return "ratio" if document["settings"]["reference"] else "perplexity"


def _by_size(document: Document) -> Figure:
    """Perplexity (log scale) against cache size, a line a method."""
    from kvalign.eval.plots import draw, series

    return draw(
        {EVALUATION.title(document): series(document["rows"], "cache_size", "perplexity")},
        x="cache size (entries)",
        y="perplexity (lower is better)",
        doubling_x=True,
        log_y=True,
    )


EVALUATION = Perplexity()
