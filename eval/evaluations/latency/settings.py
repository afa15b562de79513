"""Settings of `kvalign eval latency`."""

from dataclasses import dataclass
from pathlib import Path

from kvalign.eval.protocol import KEEP_PARTS, DrawnSettings, seed_option
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import MOST_ROWS, MOST_THREADS, option


@dataclass(frozen=True, kw_only=True)
class LatencySettings(DrawnSettings):
    """Measure time to the first token, time per token with a full cache, and peak memory. Methods
    take turns, so that a busy moment affects all. The bare step, without any eviction, is the
    floor.

    `--model shape:distilgpt2` (gpt2, gpt2-xl, smollm2-135m, qwen3-0.6b, llama-3-8b) uses random
    weights, which do not change speed.
    With `--memory` steps are timed with full memories of random entries, beside the same step
    without.

    Example:
        kvalign eval latency --cache-sizes 32 --num-trials 2 --trial-len 4
    """

    aligner_kinds: tuple[str, ...] | None = option(
        None,
        help="untrained kinds of kvalign instead of trained aligners, a row each: table, "
        "network (without an aligner: table,network)",
    )
    reference: str = option(
        "streaming-llm",
        help="method that ratios are relative to; if the default is not among --methods, the "
        "first of them",
    )
    batch_sizes: tuple[int, ...] = option(
        (1,), help="streams at once, comma-separated", at_least=1, at_most=MOST_ROWS
    )
    prompts: str = option(
        "own",
        help="prompts before the first token: own, mt-bench, random tokens, or a .jsonl file "
        "of turns; a shape: model has no tokenizer and uses random ones",
    )
    prompt_len: int = option(64, help="tokens of a random prompt", at_least=1, at_most=MOST_ROWS)
    generate: int = option(
        0,
        help="the paper's protocol: generate this many tokens from each trial's prompt, from "
        "an empty cache, top 20, with drawing included in the time (the paper: 5000); 0: "
        "full caches, fed random tokens",
        at_least=0,
    )
    num_trials: int = option(10, help="turns of each method; with --generate prompts", at_least=1)
    trial_len: int = option(
        20,
        help="timed tokens of a turn; rounded up to whole periods from one eviction to the "
        "next, and from one copy of a buffer to the next",
        at_least=1,
    )
    num_threads: int = option(0, help="CPU threads, 0 for all", at_least=0, at_most=MOST_THREADS)
    compile: bool = option(
        False,
        help="compile every method's step (torch.compile); on CUDA the bare step, too, and capture "
        "them",
    )
    captured: bool = option(
        False, help="on CUDA: capture every method's step, as generate does, and the bare step"
    )
    seed: int = seed_option("weights, tokens and draws")
    keep: Path | None = KEEP_PARTS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference not in self.methods:
            object.__setattr__(self, "reference", self.methods[0])
        if any(self.memory):  # beside the same without
            object.__setattr__(self, "memory", tuple(dict.fromkeys((0, *self.memory))))
        if self.aligner and self.aligner_kinds:
            raise UserError("give --aligner (trained) or --aligner-kinds (untrained), not both")
