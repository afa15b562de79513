"""`kvalign eval latency`: time per token of all methods, side by side in one run."""

from dataclasses import dataclass

from kvalign.commands.stream_settings import StreamSettings
from kvalign.settings import option


@dataclass(frozen=True, kw_only=True)
class LatencySettings(StreamSettings):
    """Time per token of methods whose cache is full; they take turns, so that a busy moment hits
    all.

    `--model shape:distilgpt2` (gpt2, smollm2-135m) takes random weights: they do not change speed.

    Example:
        kvalign eval latency --cache-sizes 32 --num-trials 2 --trial-len 4
    """

    methods: tuple[str, ...] = option(
        ("window", "streaming-llm", "kvalign", "discard-half", "recompute"),
        help="methods, comma-separated",
    )
    cache_sizes: tuple[int, ...] = option(
        (64,), help="entries the cache keeps, comma-separated", at_least=1
    )
    num_evicted: int | None = option(
        None, help="entries evicted at once (default: 1; discard-half: half the window)", at_least=1
    )
    aligner_kinds: tuple[str, ...] = option(
        ("table", "network"),
        help="kinds of kvalign, a row each, untrained: table, network, anchored",
    )
    reference: str = option("streaming-llm", help="method to give each row's ratio to")
    batch_size: int = option(1, help="streams at once", at_least=1)
    num_trials: int = option(10, help="turns of each method", at_least=1)
    trial_len: int = option(20, help="tokens timed in a turn", at_least=1)
    num_threads: int = option(0, help="CPU threads, 0 for all", at_least=0)
    seed: int = option(0, help="seed of weights and tokens")
    json: bool = option(False, help="print one JSON document with settings and rows")


def run(settings: LatencySettings) -> None:
    import json

    from kvalign.eval.latency import measure
    from kvalign.eval.table import as_text

    result = measure(settings)
    print(json.dumps(result) if settings.json else as_text(result["rows"]))
