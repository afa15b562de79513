"""Frontier: perplexity against the time of a token, both of the same methods in one run.

Labels are those of `eval perplexity`. Steps are those of `eval latency`, of full caches on one
thread, whole periods from one eviction to the next, methods taking turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvalign.cache.sizes import num_evicted_of
from kvalign.eval.evaluations.latency import SLOWEST
from kvalign.eval.evaluations.perplexity import COLUMNS as OF_TEXT
from kvalign.eval.evaluations.perplexity import PerplexitySettings
from kvalign.eval.protocol import DrawnSettings, Evaluation, corpus_option, seed_option
from kvalign.eval.protocol.data import Column, Document, Drawing, Row
from kvalign.eval.protocol.document import measures, summary_of
from kvalign.eval.protocol.tables import grouped
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import like, option

if TYPE_CHECKING:
    from torch import Tensor

    from kvalign.eval.evaluations.latency.timing import Turns
    from kvalign.methods.base import Method
    from kvalign.models.loading import LoadedModel

MANY = "discard-half"  # the method that takes part with several numbers evicted at once


@dataclass(frozen=True, kw_only=True)
class FrontierSettings(DrawnSettings):
    """Set perplexity against the time of a token: which methods no other beats in both? They are
    the frontier. `dense` has no time of its own, since its steps grow.

    Example:
        kvalign eval frontier --cache-sizes 32 --num-tokens 300 --num-trials 5
    """

    corpus: str = corpus_option("text to score")
    num_tokens: int = like(PerplexitySettings, "num_tokens", 2000, more="")
    first_label: int | None = like(PerplexitySettings, "first_label", more="")
    discard: tuple[str, ...] = option(
        ("quarter", "eighth", "8"),
        help=f"what {MANY} drops at once beside half, a row each: numbers, or parts of the window",
    )
    reference: str = option(
        "recompute",
        help="method that perplexities are relative to, too; if the default is not among "
        "--methods, the first of them",
    )
    num_trials: int = option(30, help="turns of each method", at_least=2)
    trial_len: int = option(
        20, help="least timed tokens of a turn; the longest period of all methods", at_least=1
    )
    seed: int = seed_option("tokens and turns")
    keep: Path | None = option(
        None, help="folder that keeps the loss of each token, but no time", writes="folder"
    )

    def of_text(self) -> PerplexitySettings:
        """Settings of the losses, which check those that both have."""
        names = ("methods", "cache_sizes", "protocol", "num_tokens", "first_label", "keep")
        return PerplexitySettings(**{name: getattr(self, name) for name in names})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference not in self.methods:
            object.__setattr__(self, "reference", self.methods[0])
        self.of_text()
        for number in self.discard:
            num_evicted_of(number, 2)
        if {*self.methods} == {"dense"}:
            raise UserError("dense has no time of its own: give other --methods, too")


@measures(FrontierSettings)
def frontier(
    settings: FrontierSettings, loaded: LoadedModel, methods: list[Method]
) -> Iterable[Row]:
    """Score and time every method at every cache size.

    Returns:
        A document whose rows have the sizes, the perplexity with its interval, and `COLUMNS`, as
        far as a method has a time.

    Raises:
        UserError: a corpus that ends before the last label; `dense` beyond the context length.
    """
    from kvalign.eval.evaluations.perplexity.scores import score_all
    from kvalign.eval.protocol.grid import make_grid, read_texts, sizes_of
    from kvalign.foundation.runs import keeping

    if MANY in settings.methods and settings.discard:
        sinks = tuple(dict.fromkeys(x.sizes.num_sinks for x in methods if x.name == MANY))
        more = replace(
            settings,
            methods=(MANY,),
            reference=MANY,
            num_sinks=sinks,
            num_evicted=settings.discard,
        )
        candidates = [*methods, *make_grid(more, loaded.model)]
        methods = [*{tuple(sizes_of(one).values()): one for one in candidates}.values()]
    of_text = settings.of_text()
    shape = (1, of_text.first_label_of(max(settings.cache_sizes)) + settings.num_tokens)
    ids = read_texts(loaded, settings.corpus, shape, "--num-tokens or --cache-sizes")
    with keeping(lambda: summary_of(settings.keep)):
        scored, losses = score_all(methods, ids, of_text)
    names = ("first_label", "num_labels", "nll_nats", "perplexity", "low", "high")
    rows = [
        sizes_of(method) | {name: row[name] for name in names} | dict.fromkeys(OF_TIME)
        for method, row in zip(methods, scored, strict=True)
    ]
    for size in dict.fromkeys(settings.cache_sizes):
        of_size = [i for i, row in enumerate(rows) if row["cache_size"] == size]
        timed = [i for i in of_size if methods[i].name != "dense"]
        turns = time_turns([methods[i] for i in timed], settings)
        judge([rows[i] for i in timed], [losses[i] for i in timed], turns)
        compare([rows[i] for i in of_size], [losses[i] for i in of_size], settings.reference)
    return sorted(rows, key=lambda row: (row["cache_size"], row["mean_ms"] or math.inf))


def time_turns(methods: Sequence[Method], settings: FrontierSettings) -> Turns:
    """Seconds of the steps of methods of one cache size, which take turns."""
    import torch

    from kvalign.eval.evaluations.latency.settings import LatencySettings
    from kvalign.eval.evaluations.latency.timing import time_steps

    how = LatencySettings(
        num_trials=settings.num_trials,
        trial_len=max(settings.trial_len, *(method.sizes.num_evicted for method in methods)),
        num_threads=1,
        seed=settings.seed,
    )
    num_threads = torch.get_num_threads()
    torch.set_num_threads(how.num_threads)
    try:
        with progress.shown_as("timing") as bar:
            bar.expect(settings.num_trials * len(methods), "turns")
            return time_steps(methods, 1, how, bar)
    finally:
        torch.set_num_threads(num_threads)


OF_TIME = (
    *("num_steps", "mean_ms", "ms_low", "ms_high", "median_ms", "slowest_ms"),
    *("ratio", "ratio_low", "ratio_high", "frontier"),
)
SURE, PERHAPS = "yes", "perhaps"
PANELS = 6


def judge(rows: Sequence[Row], losses: Sequence[Tensor], turns: Turns) -> None:
    """Add `COLUMNS` to rows of one cache size, from their losses [N] and seconds of their turns.

    A row's rivals are those with equal sinks that are not surely slower: the interval of the mean
    difference of their turns reaches down to 0. It is on the frontier if none has a lower
    perplexity.
    """
    import torch

    from kvalign.eval.evaluations.latency.timing import slowest
    from kvalign.foundation.statistics import mean_interval

    means = [1e3 * torch.tensor([sum(x) / len(x) for x in times]).double() for times in turns]
    for i, (row, times) in enumerate(zip(rows, turns, strict=True)):
        low, high = mean_interval(means[i])
        num = sum(map(len, times))
        row |= {"num_steps": num, "mean_ms": 1e3 * sum(map(sum, times)) / num}
        row |= {"ms_low": low, "ms_high": high, "median_ms": means[i].median().item()}
        row["slowest_ms"] = 1e3 * slowest(times)
        rivals = [
            losses[j]
            for j, other in enumerate(rows)
            if j != i and other["num_sinks"] == row["num_sinks"]
            if mean_interval(means[j] - means[i])[0] <= 0
        ]
        row["frontier"] = SURE
        if rivals:
            row |= _relative("ratio", losses[i], min(rivals, key=lambda nll: nll.mean().item()))
            is_sure = row["ratio_high"] is not None and row["ratio_high"] < 1
            row["frontier"] = SURE if is_sure else PERHAPS if row["ratio"] < 1 else ""


def compare(rows: Sequence[Row], losses: Sequence[Tensor], reference: str) -> None:
    """Add `by_reference` and its interval to rows of one cache size, with their losses [N]: their
    perplexity relative to that of the first row of the reference.
    """
    base = next(nll for row, nll in zip(rows, losses, strict=True) if row["method"] == reference)
    for row, nll in zip(rows, losses, strict=True):
        row |= _relative("by_reference", nll, base)


def _relative(name: str, losses: Tensor, base: Tensor) -> Row:
    from kvalign.foundation.statistics import interval

    difference = losses - base
    low, high = interval(difference)
    ratio = difference.double().mean().exp().item()
    return {name: ratio, f"{name}_low": low, f"{name}_high": high}


COLUMNS = {
    "mean_ms": Column(
        "ms/token", 2, "lower", "mean over whole periods; 95 % over turns", ("ms_low", "ms_high")
    ),
    "slowest_ms": SLOWEST,
    "perplexity": replace(OF_TEXT["perplexity"], by_reference=False),
    "by_reference": replace(
        OF_TEXT["ratio"], title="by reference", ends=("by_reference_low", "by_reference_high")
    ),
    "ratio": Column(
        "by the best not slower",
        3,
        about="perplexity relative to the best of the others with equal sinks that are not surely "
        "slower (95 %, paired turns), on the same labels; 95 %, paired moving blocks",
        ends=("ratio_low", "ratio_high"),
    ),
    "frontier": Column(
        "frontier",
        None,
        about="yes: the ratio's interval lies below 1, or all others are surely slower; perhaps: "
        "the ratio lies below 1",
    ),
}


class Frontier(Evaluation):
    settings = FrontierSettings
    run = staticmethod(frontier)
    heading = "Perplexity against time"
    about = (
        "Perplexity of the same labels, and the mean time of a token with a full cache, over whole "
        "periods, so that refills count; one thread, methods taking turns. What no other with "
        "equal sinks beats in both is the frontier."
    )
    columns = COLUMNS

    def figure(self, document: Document) -> Drawing:
        """A panel for each cache size; of more than `PANELS` the ratio by size, a line a method,
        which drops as many at once as it can.
        """
        from kvalign.eval.drawing import draw, draw_frontier, series

        model, rows = self.title(document), document["rows"]
        sizes = grouped(rows, "cache_size")
        if len(sizes) > PANELS:
            most: dict[tuple[str, int], int] = {}
            for row in rows:
                one = row["method"], row["cache_size"]
                most[one] = max(most.get(one, 0), row["num_evicted"])
            judged = [
                row
                for row in rows
                if row["ratio_high"] is not None
                and row["num_evicted"] == most[row["method"], row["cache_size"]]
            ]
            lines = series(judged, "cache_size", "ratio", "ratio_high", low="ratio_low")
            y = "by the best that is not slower"
            figure = draw({model: lines}, x="cache size (entries)", y=y, size=(9.6, 4.4))
            return figure, f"Perplexity relative to the best that is not surely slower: {model}"
        panels = {f"{model}, C = {size}": group for size, group in sizes.items()}
        figure = draw_frontier(panels)
        return figure, f"Perplexity against time: {model}; rings: the frontier; bars: 95 %"


EVALUATION = Frontier()
