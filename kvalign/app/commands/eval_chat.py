"""`kvalign eval chat`: many conversations through one stream, each answer judged."""

from dataclasses import dataclass
from pathlib import Path

from kvalign.app.commands.stream_settings import ComparisonSettings
from kvalign.settings import option


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
    json: bool = option(False, help="print one JSON document with settings, rows and answers")


def run(settings: ChatSettings) -> None:
    import json

    from kvalign.eval.evaluations.chat import evaluate
    from kvalign.eval.rows import as_text, means

    result = evaluate(settings)
    if settings.json:
        print(json.dumps(result))
    else:
        print(as_text(means(result["rows"])))
        print(f"\nwords: {result['word_list']['name']}")
