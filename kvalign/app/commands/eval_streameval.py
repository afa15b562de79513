"""`kvalign eval streameval`: ask an endless stream for values registered some lines before."""

from kvalign.eval.settings import StreamEvalSettings

SETTINGS = StreamEvalSettings


def run(settings: StreamEvalSettings, as_json: bool) -> None:
    import json

    from kvalign.eval.evaluations.streameval import evaluate
    from kvalign.eval.rows import as_text

    result = evaluate(settings)
    print(json.dumps(result) if as_json else as_text(result["rows"]))
