"""`kvalign eval perplexity`: compare methods on perplexity and time."""

from dataclasses import dataclass
from pathlib import Path

from kvalign.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class PerplexitySettings(Settings):
    """Compare methods on perplexity: the same labels for each at every cache size, lower is better.

    Example:
        kvalign eval perplexity --methods streaming-llm,kvalign,recompute --cache-sizes 32
        --num-tokens 100
    """

    model: str = option("gpt2-mini", help="shipped name, hub id or folder of a causal LM")
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
    num_sinks: int | None = option(
        None, help="first entries never evicted (default: 4; window and recompute: 0)", at_least=0
    )
    num_evicted: int | None = option(
        None, help="entries evicted at once (default: 1; discard-half: half the window)", at_least=1
    )
    num_tokens: int = option(2000, help="labels to score", at_least=1)
    aligner: tuple[str, ...] | None = option(
        None,
        help="aligners of kvalign, a row each: folder, hub id or shipped name (default: shipped)",
    )
    dtype: str = option(
        "float32", help="precision of the model", choices=("float32", "bfloat16", "float16")
    )
    device: str = option("cpu", help="cpu, cuda, mps, ...")
    plot: Path | None = option(None, help="also draw perplexity against cache size (.png or .svg)")
    json: bool = option(False, help="print one JSON document with settings and rows")


def run(settings: PerplexitySettings) -> None:
    import json

    from kvalign.eval.perplexity import evaluate
    from kvalign.eval.table import as_text

    result = evaluate(settings)
    if settings.plot:
        from kvalign.eval.plots import plot_perplexity

        plot_perplexity(result, settings.plot)
    print(json.dumps(result) if settings.json else as_text(result["rows"]))
