"""Time and memory of streaming methods, all in one process, taking turns (`timing.py`); the bare
step (`subjects.py`) is timed among them.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from kvalign.eval.evaluations.latency.settings import LatencySettings
from kvalign.eval.protocol import Evaluation
from kvalign.eval.protocol.data import FLOOR, Column, Document, Drawing, Row
from kvalign.eval.protocol.document import document, kept, summary_of
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import keywords_of

if TYPE_CHECKING:
    from kvalign.models.loading import LoadedModel


@keywords_of(LatencySettings)
@progress.shown_as("eval latency")
def latency(settings: LatencySettings, *, loaded: LoadedModel | None = None) -> Document:
    """Measure the bare step and every method at every cache size and batch size.

    Returns:
        A document whose rows have the sizes, num_steps (timed calls, without the first tokens) and
        `COLUMNS`, as far as they apply: rows of the bare step first, and of each method without a
        memory if any row has one. Times per token are those of a step divided by the batch size;
        ttft_ms, the median over the trials, is of all streams together. "weights_mb" of the
        document is what the weights take in memory, in 10^6 bytes.

    Raises:
        UserError: a method that ends before so many tokens.
    """
    import torch

    from kvalign.eval.evaluations.latency.subjects import load_with_prompts, untrained_aligners
    from kvalign.eval.evaluations.latency.timing import measure, num_turns, part_key
    from kvalign.eval.protocol.grid import make_grid
    from kvalign.foundation.machine import resolved
    from kvalign.foundation.runs import keeping
    from kvalign.models.model_folder import num_bytes

    device = resolved(settings.device)
    if settings.captured and not device.startswith("cuda"):
        raise UserError("--captured needs --device cuda: on a CPU steps are not captured")
    started = time.perf_counter()
    num_threads = torch.get_num_threads()
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    try:
        settings, model, prompts = load_with_prompts(settings, loaded)
        methods = make_grid(settings, model, untrained_aligners(model, settings))
        if settings.compile:
            methods = [method.compile() for method in methods]
        elif settings.captured:
            methods = [method.take_ready_stepper() for method in methods]
        rows: list[Row] = []
        with keeping(lambda: summary_of(settings.keep)), progress.shown_as("timing") as bar:
            bar.expect(num_turns(settings, len(methods)), "turns")
            for cache_size in dict.fromkeys(settings.cache_sizes):
                group = [method for method in methods if method.sizes.cache_size == cache_size]
                for batch_size in settings.batch_sizes:
                    part = partial(measure, group, prompts, batch_size, settings, bar)
                    key = part_key(group, prompts, batch_size, settings)
                    rows += kept(settings.keep, key, part)
        more: dict[str, Any] = {"started": started, "weights_mb": num_bytes(model) / 1e6}
        return document("eval latency", settings, rows, **more)
    finally:
        torch.set_num_threads(num_threads)


BARE = "relative to the bare step: one pass over C + 1 entries, nothing evicted"
SLOWEST = Column(
    "slowest ms",
    2,
    "lower",
    "the slowest step of a turn, the median over turns: a refill, where there is one",
)
COLUMNS = {
    "batch_size": Column("batch"),
    "mean_ms": Column("ms/token", 2, "lower", "mean over whole periods, the cost of a stream"),
    "median_ms": Column("median ms", 2, "lower", "half of the steps are faster"),
    "p99_ms": Column("p99 ms", 2, "lower", "99 steps of 100 are faster"),
    "slowest_ms": SLOWEST,
    "ratio": Column(
        "ratio",
        3,
        "lower",
        "mean relative to the reference's mean on the same work",
        by_reference=True,
    ),
    "memory_ratio": Column(
        "ratio to no memory",
        3,
        about="mean relative to the same method without a memory; memories are full of random "
        "entries",
    ),
    "stored_bytes": Column("stored bytes", 0, about="bytes of a full memory per stored token"),
    "stored_ratio": Column(
        "ratio to cache",
        3,
        about="the same relative to 2 L H D numbers, the size of a token in a cache",
    ),
    "cache_mb": Column("full MB", 1, "lower", "10^6 bytes of a full cache with its memory"),
    "bare_mean_ratio": Column("mean ratio to bare", 3, "lower", f"mean {BARE}"),
    "bare_ratio": Column("median ratio to bare", 3, "lower", f"median {BARE}"),
    "tokens_per_s": Column("tokens/s", 1, "higher", "of all streams together, from the mean"),
    "ttft_ms": Column("first token, ms", 1, "lower", "prompt to first logits"),
    "peak_mb": Column("peak MB", 1, "lower", "10^6 bytes beyond the weights, as a cache fills"),
}


BUSY_FROM = 1.2  # mean of a bare step by its median


class Latency(Evaluation):
    settings = LatencySettings
    run = staticmethod(latency)
    heading = "Time per token"
    about = (
        "Eviction and realignment are timed, and methods take turns in one process (the "
        "paper's figure 4). Lines are means over whole periods from one eviction to the next, "
        "so the refills of discard-half count in full. Whiskers reach to the 99th percentile. "
        "The bare step, one pass over C + 1 entries with nothing evicted, is the lower bound "
        "of methods that see as many. The first token is timed separately. From a prompt "
        "longer than the cache, recompute and discard-half read only the part that they keep."
    )
    over = "cache_size"
    columns = COLUMNS

    def doubt(self, document: Document) -> str:
        """Return that the machine did something else, too, by its load and by the mean of a bare
        step; "" if it did not.
        """
        rows, machine = document["rows"], document["environment"]
        skew = [row["mean_ms"] / row["median_ms"] for row in rows if row["method"] == FLOOR]
        ratio, load, cores = max(skew, default=1.0), machine.get("load", 0), machine.get("cores", 1)
        if ratio > BUSY_FROM:
            why = f"the mean of a bare step is {ratio:.1f} times its median"
        elif load > cores + 1:  # what runs, and what waits for it
            why = f"a load of {load:g} on {cores} cores"
        else:
            return ""
        return f"The machine was busy ({why}), so times are not compared: measure again."

    def figure(self, document: Document) -> Drawing:
        """Time per token (log scale) against cache size, a line a method, a panel a batch size."""
        from kvalign.eval.drawing import draw, panels_by

        title, figures = self.title(document), ("cache_size", "mean_ms", "p99_ms")
        panels = panels_by("batch_size", document["rows"], f"{title}, batch ", *figures)
        y = "ms/token (lower is better)\nbars: to the 99th percentile"
        figure = draw(panels, x="cache size (entries)", y=y, doubling_x=True, log_y=True)
        caption = f"Time per token: {title}; bars: to the 99th percentile. {self.doubt(document)}"
        return figure, caption.removesuffix(". ")


EVALUATION = Latency()
