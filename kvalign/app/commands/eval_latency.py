"""`kvalign eval latency`: time and memory of all methods, side by side in one run."""

from dataclasses import dataclass

from kvalign.app.commands.stream_settings import ComparisonSettings
from kvalign.settings import option


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
    json: bool = option(False, help="print one JSON document with settings and rows")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aligner and self.aligner_kinds:
            raise ValueError("give --aligner (trained) or --aligner-kinds (untrained), not both")


def run(settings: LatencySettings) -> None:
    import json

    from kvalign.eval.evaluations.latency import measure
    from kvalign.eval.rows import as_text

    result = measure(settings)
    print(json.dumps(result) if settings.json else as_text(result["rows"]))
