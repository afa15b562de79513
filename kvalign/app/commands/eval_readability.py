"""`kvalign eval readability`: let methods write, and judge what they wrote."""

from kvalign.eval.settings import ReadabilitySettings

SETTINGS = ReadabilitySettings


def run(settings: ReadabilitySettings, as_json: bool) -> None:
    import json

    from kvalign.eval.evaluations.readability import evaluate
    from kvalign.eval.rows import as_text, means

    result = evaluate(settings)
    if as_json:
        print(json.dumps(result))
    else:
        print(as_text(means(result["rows"])))
        print(f"\nwords: {result['word_list']['name']}")
