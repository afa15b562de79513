"""What can be set for the evaluations."""

from dataclasses import dataclass
from pathlib import Path

from kvalign.errors import UserError
from kvalign.settings import NUM_SINKS, ModelSettings, option


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings(ModelSettings):
    """Base of the settings of the evaluations: which methods, at which sizes."""

    num_sinks: int | None = option(None, help=NUM_SINKS, at_least=0)
    methods: tuple[str, ...] = option(
        ("window", "streaming-llm", "kvalign", "discard-half", "recompute"),
        help="methods, comma-separated",
    )
    aligner: tuple[str, ...] | None = option(
        None,
        help="aligners of kvalign, a row each: folder, hub id or shipped name (default: shipped)",
    )
    cache_sizes: tuple[int, ...] = option(
        (64,), help="entries the cache keeps, sinks included, comma-separated", at_least=1
    )
    num_evicted: tuple[str, ...] | None = option(
        None,
        help="entries evicted at once, comma-separated numbers or half (of the cache) "
        "(default: 1; discard-half: half the window)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for number in self.num_evicted or ():
            if number != "half" and not (number.isascii() and number.isdigit()):
                raise UserError(f"--num-evicted takes numbers or half, got {number!r}")


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
        if self.aligner and self.aligner_kinds:
            raise UserError("give --aligner (trained) or --aligner-kinds (untrained), not both")


@dataclass(frozen=True, kw_only=True)
class ReadabilitySettings(ComparisonSettings):
    """Let methods continue prompts and judge the passages: dictionary words in chunks of 10 tokens
    (the paper's rule), repetition, perplexity under the model itself.

    Example:
        kvalign eval readability --cache-sizes 32 --num-prompts 1 --max-new-tokens 40
    """

    prompts: str = option("own", help="what to continue: own, mt-bench, or a .jsonl file of turns")
    num_prompts: int = option(2, help="prompts to continue, the first of them", at_least=1)
    max_new_tokens: int = option(600, help="tokens to generate for each prompt", at_least=1)
    top_k: int = option(
        20, help="draw from the k most likely tokens; 1 takes the most likely", at_least=1
    )
    no_repeat_ngram_sizes: tuple[int, ...] = option(
        (0,), help="never repeat an n-gram of this size, a run each; 0: off", at_least=0
    )
    words: str = option(
        "auto",
        help="word list; auto: NLTK's where it is at hand or can be fetched",
        choices=("auto", "nltk", "english-words"),
    )
    nltk_data: Path | None = option(None, help="folder with NLTK's corpora/words.zip")
    seed: int = option(0, help="seed of the draws, the same for each method")


@dataclass(frozen=True, kw_only=True)
class StreamEvalSettings(ComparisonSettings):
    """Ask for values registered some lines back in an endless stream: how far back a method, and
    the model itself, can read.

    Example:
        kvalign eval streameval --num-lines 20 --distances 0,5
    """

    distances: tuple[int, ...] = option(
        (0, 5, 10, 20, 40),
        help="lines back to ask for, a row each, comma-separated; 0: the latest line",
        at_least=0,
    )
    num_lines: int = option(200, help="lines of the stream, a value each", at_least=1)
    query_every: int = option(10, help="lines from one query to the next", at_least=1)
    seed: int = option(0, help="seed of the values, the same for each method and distance")

    def __post_init__(self) -> None:
        super().__post_init__()
        last = self.num_lines - self.num_lines % self.query_every
        if last <= max(self.distances):
            raise UserError(
                f"--num-lines {self.num_lines} and --query-every {self.query_every} put the last "
                f"query after line {last}, which must exceed the largest of --distances "
                f"({max(self.distances)}): raise --num-lines"
            )


@dataclass(frozen=True, kw_only=True)
class ChatSettings(ComparisonSettings):
    """Feed turns one after another through one endless stream and judge each answer: how fluent it
    stays, not whether it is right.

    Example:
        kvalign eval chat --cache-sizes 32 --num-turns 2 --max-new-tokens 30
    """

    prompts: str = option("own", help="conversations: own, mt-bench, or a .jsonl file of turns")
    num_turns: int = option(8, help="turns to feed, the first of them", at_least=1)
    max_new_tokens: int = option(100, help="tokens of an answer at most", at_least=1)
    top_k: int = option(
        20, help="draw from the k most likely tokens; 1 takes the most likely", at_least=1
    )
    words: str = option(
        "auto",
        help="word list; auto: NLTK's where it is at hand or can be fetched",
        choices=("auto", "nltk", "english-words"),
    )
    nltk_data: Path | None = option(None, help="folder with NLTK's corpora/words.zip")
    seed: int = option(0, help="seed of the draws, the same for each method")
