"""What the columns of results mean: their titles, digits, and which direction is better."""

from dataclasses import dataclass
from typing import Any, Literal

Better = Literal["lower", "higher", ""]


@dataclass(frozen=True)
class Metric:
    """A column: its title on a page, decimals shown, the better direction (none: a description)."""

    title: str
    digits: int
    better: Better = ""
    about: str = ""

    def text(self, value: Any) -> str:
        return "" if value is None else f"{value:.{self.digits}f}"


METRICS = {
    "nll_nats": Metric("NLL, nats", 4, "lower", "mean loss of a label"),
    "perplexity": Metric("perplexity", 2, "lower", "exp of the mean loss of the labels"),
    "low": Metric("95 % from", 2, about="block bootstrap over the labels"),
    "high": Metric("95 % to", 2, about="block bootstrap over the labels"),
    "ratio": Metric("ratio", 3, "lower", "by the reference's figure on the same work"),
    "ratio_low": Metric("ratio from", 3, about="95 %, paired block bootstrap"),
    "ratio_high": Metric("ratio to", 3, about="95 %, paired block bootstrap"),
    "drift": Metric("drift", 3, about="ratio in the last quarter of the labels by the first's"),
    "seconds": Metric("total s", 1, "lower", "time of the whole run"),
    "ttft_ms": Metric("first token, ms", 1, "lower", "prompt to first logits"),
    "median_ms": Metric("ms/token", 2, "lower", "median of a step, cache full"),
    "mean_ms": Metric("mean ms", 2, "lower", "mean of a step"),
    "p90_ms": Metric("p90 ms", 2, "lower", "nine steps of ten are faster"),
    "p99_ms": Metric("p99 ms", 2, "lower", "99 steps of 100 are faster"),
    "peak_mb": Metric("peak MB", 1, "lower", "most memory held beyond the weights"),
    "readable": Metric("readable", 3, "higher", "share of chunks, half of whose tokens are words"),
    "chat": Metric("readable in chat", 3, "higher", "share of readable chunks of the answers"),
    "distinct_1": Metric("distinct-1", 3, about="different words by all words"),
    "distinct_2": Metric("distinct-2", 3, about="different pairs of words by all pairs"),
    "repetition": Metric("repetition", 3, "lower", "share of 4-grams that were there before"),
    "longest_run": Metric("longest run", 1, "lower", "tokens that only repeat a short phrase"),
    "dense_perplexity": Metric(
        "dense perplexity", 1, about="of the passage under the model, nothing evicted"
    ),
    "accuracy": Metric("accuracy", 3, "higher", "share of queries answered exactly"),
    # No merit as long as no answer is right: it is low for what guesses digits well.
    "answer_nll_nats": Metric("answer NLL, nats", 3, about="loss of the right answer"),
    "in_cache": Metric("in cache", 2, about="share of queries whose line is still kept"),
    "distance_tokens": Metric("tokens back", 1, about="from the value to its answer"),
}


def best(values: list[Any], better: Better) -> set[int]:
    """Indices of the best values; none where no direction is better or all are alike."""
    known = [value for value in values if value is not None]
    if not better or len(set(known)) < 2:
        return set()
    top = min(known) if better == "lower" else max(known)
    return {i for i, value in enumerate(values) if value == top}
