"""Time and memory of streaming methods: all in one process, taking turns.

Time to the first token and time per token are measured apart, since a prompt is read at once and
with room in the cache, and what follows step by step with the cache full; memory is measured when
no clock runs. The ratio to the reference is that of the medians per token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvalign.errors import UserError
from kvalign.eval.evaluation import Column, Document, Evaluation, Row
from kvalign.eval.settings import ComparisonSettings
from kvalign.settings import keywords_of, option

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvalign.models import LoadedModel


@dataclass(frozen=True, kw_only=True)
class LatencySettings(ComparisonSettings):
    """Time to the first token, time per token once the cache is full, and peak memory. Methods take
    turns, so that a busy moment hits all.

    `--model shape:distilgpt2` (gpt2, smollm2-135m) takes random weights: they do not change speed.

    Example:
        kvalign eval latency --cache-sizes 32 --num-trials 2 --trial-len 4
    """

    aligner_kinds: tuple[str, ...] | None = option(
        None,
        help="untrained kinds of kvalign, without --aligner, a row each: table, network, anchored "
        "(default: table,network)",
    )
    reference: str = option("streaming-llm", help="method to give each row's ratio to")
    batch_sizes: tuple[int, ...] = option((1,), help="streams at once, comma-separated", at_least=1)
    prompts: str = option(
        "own",
        help="what the first token follows: own, mt-bench, or a .jsonl file of turns; a shape: "
        "model, which has no tokenizer, ignores it",
    )
    prompt_len: int = option(
        64, help="random tokens that the first token of a shape: model follows", at_least=1
    )
    num_trials: int = option(10, help="turns of each method", at_least=1)
    trial_len: int = option(20, help="tokens timed in a turn", at_least=1)
    num_threads: int = option(0, help="CPU threads, 0 for all", at_least=0)
    seed: int = option(0, help="seed of weights and tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference not in self.methods:
            raise UserError(f"--reference {self.reference} is not among --methods")
        if self.aligner and self.aligner_kinds:
            raise UserError("give --aligner (trained) or --aligner-kinds (untrained), not both")


@keywords_of(LatencySettings)
def latency(settings: LatencySettings, *, loaded: LoadedModel | None = None) -> Document:
    """Measure every method at every cache size and batch size.

    Returns:
        A document whose rows have the sizes, num_steps (calls timed, without the first tokens), and
        `COLUMNS`: times per token are those of a step divided by the batch size; ttft_ms is from an
        empty cache to the logits after a prompt, for all streams together, median over the trials;
        peak_mb (10^6 bytes) from an empty cache through a first input of cache_size + 1 tokens and
        3 steps, None where the device does not tell; ratios are at the same cache and batch size.
    """
    import torch
    from tqdm.auto import tqdm

    from kvalign.eval.document import document
    from kvalign.eval.grid import make_grid
    from kvalign.eval.latency_models import load_with_prompts, untrained_aligners
    from kvalign.eval.timing import measure

    started = time.perf_counter()
    num_threads = torch.get_num_threads()
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    try:
        settings, model, prompts = load_with_prompts(settings, loaded)
        methods = make_grid(settings, model, untrained_aligners(model, settings))
        rows: list[Row] = []
        num_turns = len(methods) * len(settings.batch_sizes) * (2 * settings.num_trials + 1)
        with tqdm(total=num_turns, unit="turn", smoothing=0.05) as bar:
            for cache_size in dict.fromkeys(settings.cache_sizes):
                group = [method for method in methods if method.sizes.cache_size == cache_size]
                for batch_size in settings.batch_sizes:
                    rows += measure(group, prompts, batch_size, settings, bar)
        return document("eval latency", settings, rows, started=started)
    finally:
        torch.set_num_threads(num_threads)


COLUMNS = {
    "batch_size": Column("batch"),
    "median_ms": Column("ms/token", 2, "lower", "median of a step, cache full"),
    "mean_ms": Column("mean ms", 2, "lower", "mean of a step"),
    "p90_ms": Column("p90 ms", 2, "lower", "nine steps of ten are faster"),
    "p99_ms": Column("p99 ms", 2, "lower", "99 steps of 100 are faster"),
    "ratio": Column("ratio", 3, "lower", "by the reference's figure on the same work"),
    "ttft_ms": Column("first token, ms", 1, "lower", "prompt to first logits"),
    "peak_mb": Column("peak MB", 1, "lower", "most memory held beyond the weights", True),
}


class Latency(Evaluation):
    settings = LatencySettings
    run = staticmethod(latency)
    heading = "Time per token"
    about = (
        "Steps with a full cache, eviction and realignment in the clock, methods taking turns in "
        "one process (the paper's figure 4). Lines are medians, whiskers reach to the 90th "
        "percentile. The first token is timed apart: of a prompt longer than the cache, recompute "
        "and discard-half read only what they keep."
    )
    in_summary = ("median_ms", "ttft_ms", "peak_mb")
    columns = COLUMNS

    def summary_rows(self, document: Document) -> list[Row]:
        """Those of the first batch size."""
        rows = document["rows"]
        return [row for row in rows if row["batch_size"] == rows[0]["batch_size"]]

    def figure(self, document: Document) -> tuple[Figure, str]:
        from kvalign.eval.plots import draw, panels_by

        title, figures = self.title(document), ("cache_size", "median_ms", "p90_ms")
        panels = panels_by("batch_size", document["rows"], f"{title}, batch ", *figures)
        x, y = "cache size (entries)", "ms/token (lower is better)"
        figure = draw(panels, x=x, y=y, doubling_x=True, log_y=True)
        return figure, f"Time per token: {title}"


EVALUATION = Latency()
