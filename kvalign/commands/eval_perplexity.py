"""`kvalign eval perplexity`: compare methods on perplexity and time."""

from dataclasses import dataclass
from pathlib import Path

from kvalign.commands.stream_settings import StreamSettings
from kvalign.settings import option


@dataclass(frozen=True, kw_only=True)
class PerplexitySettings(StreamSettings):
    """Compare methods on perplexity: the same labels for each at every cache size, lower is better.

    Example:
        kvalign eval perplexity --methods kvalign,recompute --cache-sizes 32 --num-tokens 100
    """

    corpus: str = option(
        "python-docs", help="text to score: python-docs, wikitext, hub:NAME, text:PATH, ..."
    )
    methods: tuple[str, ...] = option(
        ("window", "streaming-llm", "kvalign", "discard-half", "recompute"),
        help="methods, comma-separated",
    )
    cache_sizes: tuple[int, ...] = option(
        (32, 64), help="entries the cache keeps, comma-separated", at_least=1
    )
    num_tokens: int = option(2000, help="labels to score", at_least=1)
    aligner: tuple[str, ...] | None = option(
        None,
        help="aligners of kvalign, a row each: folder, hub id or shipped name (default: shipped)",
    )
    num_evicted: tuple[str, ...] | None = option(
        None,
        help="entries evicted at once, comma-separated numbers or half (of the cache) "
        "(default: 1; discard-half: half the window)",
    )
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
    json: bool = option(False, help="print one JSON document with settings and rows")

    def __post_init__(self) -> None:
        super().__post_init__()
        for number in self.num_evicted or ():
            if number != "half" and not (number.isascii() and number.isdigit()):
                raise ValueError(f"--num-evicted takes numbers or half, got {number!r}")


def run(settings: PerplexitySettings) -> None:
    import json

    from kvalign.eval.perplexity import evaluate
    from kvalign.eval.table import as_text

    result = evaluate(settings)
    if settings.plot:
        from kvalign.eval.plots import plot_perplexity

        plot_perplexity(result, settings.plot)
    print(json.dumps(result) if settings.json else as_text(result["rows"]))
