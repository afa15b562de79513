"""`kvalign eval perplexity`: compare methods on perplexity and time."""

from dataclasses import dataclass
from pathlib import Path

from kvalign.app.commands.stream_settings import ComparisonSettings
from kvalign.settings import option


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
    json: bool = option(False, help="print one JSON document with settings and rows")


def run(settings: PerplexitySettings) -> None:
    import json

    from kvalign.eval.evaluations.perplexity import evaluate
    from kvalign.eval.rows import as_text

    result = evaluate(settings)
    if settings.plot:
        from kvalign.eval.plots import plot_perplexity

        plot_perplexity(result, settings.plot)
    print(json.dumps(result) if settings.json else as_text(result["rows"]))
