"""`kvalign eval compare`: let methods continue one prompt, table and page side by side."""

from dataclasses import dataclass
from pathlib import Path

from kvalign.commands.stream_settings import StreamSettings
from kvalign.settings import option


@dataclass(frozen=True, kw_only=True)
class CompareSettings(StreamSettings):
    """Let methods continue one prompt, measure speed on it and perplexity on a text; write a page
    of all passages.

    Example:
        kvalign eval compare --cache-size 32 --max-new-tokens 40 --num-tokens 50 --out comparison
    """

    prompt: str = option(
        " = History of the island = \n \n The island was first settled", help="text to continue"
    )
    methods: tuple[str, ...] = option(
        ("window", "streaming-llm", "kvalign", "discard-half", "recompute"),
        help="methods, comma-separated",
    )
    cache_size: int = option(64, help="entries the cache keeps, sinks included", at_least=1)
    num_evicted: int | None = option(
        None, help="entries evicted at once (default: 1; discard-half: half the window)", at_least=1
    )
    max_new_tokens: int = option(300, help="tokens to generate by each method", at_least=2)
    corpus: str = option(
        "python-docs", help="text to score: python-docs, wikitext, hub:NAME, text:PATH, ..."
    )
    num_tokens: int = option(1000, help="labels to score", at_least=1)
    aligner: tuple[str, ...] | None = option(
        None,
        help="aligners of kvalign, a row each: folder, hub id or shipped name (default: shipped)",
    )
    top_k: int = option(
        20, help="draw from the k most likely tokens; 1 takes the most likely", at_least=1
    )
    no_repeat_ngram_size: int = option(
        0, help="never repeat an n-gram of this size; 0: off", at_least=0
    )
    seed: int = option(0, help="seed of the draws, the same for each method")
    out: Path = option(help="folder for comparison.html and comparison.json")
    overwrite: bool = option(False, help="replace an earlier comparison in that folder")
    json: bool = option(False, help="print one JSON document")


def run(settings: CompareSettings) -> None:
    import json

    from kvalign.eval.compare import compare, write
    from kvalign.eval.table import as_text

    page = settings.out / "comparison.html"
    if page.exists() and not settings.overwrite:
        raise FileExistsError(f"{page} exists: name another --out or add --overwrite")
    result = compare(settings)
    write(result, settings.out)
    if settings.json:
        print(json.dumps(result))
    else:
        print(as_text([{k: v for k, v in row.items() if k != "text"} for row in result["rows"]]))
        print(f"\npassages side by side: {page}")
