"""`kvalign eval readability`: let methods write, and judge what they wrote."""

from dataclasses import dataclass
from pathlib import Path

from kvalign.app.commands.stream_settings import ComparisonSettings
from kvalign.settings import option


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
    json: bool = option(False, help="print one JSON document with settings, rows and passages")


def run(settings: ReadabilitySettings) -> None:
    import json

    from kvalign.eval.evaluations.readability import evaluate
    from kvalign.eval.rows import as_text, means

    result = evaluate(settings)
    if settings.json:
        print(json.dumps(result))
    else:
        print(as_text(means(result["rows"])))
        print(f"\nwords: {result['word_list']['name']}")
