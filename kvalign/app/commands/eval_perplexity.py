"""`kvalign eval perplexity`: compare methods on perplexity and time."""

from kvalign.eval.settings import PerplexitySettings

SETTINGS = PerplexitySettings


def run(settings: PerplexitySettings, as_json: bool) -> None:
    import json

    from kvalign.eval.evaluations.perplexity import evaluate
    from kvalign.eval.rows import as_text

    result = evaluate(settings)
    if settings.plot:
        from kvalign.eval.plots import plot_perplexity

        plot_perplexity(result, settings.plot)
    print(json.dumps(result) if as_json else as_text(result["rows"]))
