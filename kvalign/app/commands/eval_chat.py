"""`kvalign eval chat`: many conversations through one stream, each answer judged."""

from kvalign.eval.settings import ChatSettings

SETTINGS = ChatSettings


def run(settings: ChatSettings, as_json: bool) -> None:
    import json

    from kvalign.eval.evaluations.chat import evaluate
    from kvalign.eval.rows import as_text, means

    result = evaluate(settings)
    if as_json:
        print(json.dumps(result))
    else:
        print(as_text(means(result["rows"])))
        print(f"\nwords: {result['word_list']['name']}")
