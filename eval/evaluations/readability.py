"""What streaming methods write, and how it reads: one passage for each prompt, method and setting.

All methods start from the same prompts with the same seed of the draws.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise, product
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvalign.errors import UserError
from kvalign.eval.evaluation import Column, Document, Evaluation, Panel, Passage, Piece, Row
from kvalign.eval.settings import ComparisonSettings
from kvalign.settings import keywords_of, option

if TYPE_CHECKING:
    from kvalign.models import LoadedModel
    from kvalign.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class WritingSettings(ComparisonSettings):
    """Base of the settings of the evaluations of what methods write: how, and how it is judged."""

    prompts: str = option("own", help="what to continue: own, mt-bench, or a .jsonl file of turns")
    max_new_tokens: int = option(600, help="tokens to generate for each prompt", at_least=1)
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

    def sampling(self, **more: Any) -> Sampling:
        from kvalign.sampling import Sampling

        same = {name: getattr(self, name) for name in ("max_new_tokens", "top_k", "seed")}
        return Sampling(**same, **more)


@dataclass(frozen=True, kw_only=True)
class ReadabilitySettings(WritingSettings):
    """Let methods continue prompts and judge the passages: dictionary words in chunks of 10 tokens
    (the paper's rule), repetition, perplexity under the model itself.

    Example:
        kvalign eval readability --cache-sizes 32 --num-prompts 1 --max-new-tokens 40
    """

    num_prompts: int = option(2, help="prompts to continue, the first of them", at_least=1)
    no_repeat_ngram_sizes: tuple[int, ...] = option(
        (0,), help="never repeat an n-gram of this size, a run each; 0: off", at_least=0
    )


@keywords_of(ReadabilitySettings)
def readability(settings: ReadabilitySettings, *, loaded: LoadedModel | None = None) -> Document:
    """Let every method continue every prompt, and measure the passages.

    Returns:
        A document with `prompts` (the texts continued), `word_list` (name, num_words) and rows of
        the sizes, no_repeat_ngram_size, prompt (index), and the measures of
        `kvalign.eval.fluency.judge`.
    """
    from kvalign.data_gen.prompts import conversations
    from kvalign.eval.document import document
    from kvalign.eval.fluency import judge
    from kvalign.eval.grid import in_turn, load, make_grid, sizes_of
    from kvalign.eval.words import load_words
    from kvalign.text_stream import TextStream

    started = time.perf_counter()
    prompts = [turns[0] for turns in conversations(settings.prompts)][: settings.num_prompts]
    words = load_words(settings.words, settings.nltk_data)
    settings, loaded = load(settings, loaded)
    runs = list(product(settings.no_repeat_ngram_sizes, range(len(prompts))))
    num_tokens = len(runs) * settings.max_new_tokens
    rows = []
    for method, bar in in_turn(make_grid(settings, loaded.model), num_tokens, "token"):
        for ngram, number in runs:
            sampling = settings.sampling(no_repeat_ngram_size=ngram)
            stream = TextStream(loaded.tokenizer, method, sampling)
            stream.feed(prompts[number])
            prompt_ids, before = list(stream.ids), bar.n
            for _ in stream:
                bar.update(before + len(stream.token_ids) - bar.n)
            bar.update(before + settings.max_new_tokens - bar.n)
            rows.append(
                sizes_of(method)
                | {"no_repeat_ngram_size": ngram, "prompt": number}
                | judge(loaded, prompt_ids, stream.token_ids, words.words)
            )
    more = {"prompts": prompts, "word_list": words.about}
    return document("eval readability", settings, rows, started=started, **more)


MEASURES = {
    "readable": Column("readable", 3, "higher", "share of chunks, half of whose tokens are words"),
    "distinct_1": Column("distinct-1", 3, about="different words by all words"),
    "distinct_2": Column("distinct-2", 3, about="different pairs of words by all pairs"),
    "repetition": Column("repetition", 3, "lower", "share of 4-grams that were there before"),
    "longest_run": Column("longest run", 1, "lower", "tokens that only repeat a short phrase"),
    "dense_perplexity": Column("dense perplexity", 1, about="under the model, nothing evicted"),
}
MEAN_COLUMNS = {"num_passages": Column("passages", is_optional=True), **MEASURES}
CHUNK = tuple[int, int, int, int, bool]  # start, end, tokens, tokens known, readable
COLUMNS = {"no_repeat_ngram_size": Column("no repeated n-gram"), **MEAN_COLUMNS}


class JudgedText(Evaluation):
    """Base of the evaluations of what methods write: tables have the means over all passages that
    are alike in `by`.
    """

    by: ClassVar[tuple[str, ...]] = ()

    def title(self, document: Document) -> str:
        return f"{super().title(document)}, words: {document['word_list'].get('name')}"

    def rows(self, document: Document) -> list[Row]:
        from kvalign.eval.tables import means

        return means(document["rows"], MEASURES, self.by)


class Readability(JudgedText):
    by = ("no_repeat_ngram_size",)
    settings = ReadabilitySettings
    run = staticmethod(readability)
    heading = "Readability"
    about = (
        "Every method continues the same prompts with the same seed. A chunk is 10 NLTK tokens; it "
        "is readable if at least half of them are in the word list (or their stems) or end a "
        "sentence. That counts words and no sense, so repetition stands beside it. Means over the "
        "prompts; the passages are below."
    )
    in_summary = ("readable", "repetition")
    columns = COLUMNS
    row_fields = (("prompt", int), ("text", str), ("chunks", list[CHUNK]))
    document_fields = (("prompts", list[str]), ("word_list", dict[str, Any]))

    def check(self, document: Document) -> None:
        if not all(0 <= row["prompt"] < len(document["prompts"]) for row in document["rows"]):
            raise UserError("rows.prompt: must be the index of one of `prompts`")

    def summary_rows(self, document: Document) -> list[Row]:
        """Those of the first n-gram rule."""
        first = document["rows"][0]["no_repeat_ngram_size"]
        return [row for row in self.rows(document) if row["no_repeat_ngram_size"] == first]

    def panels(self, document: Document) -> list[Panel]:
        """One for each cache size, n-gram rule and prompt."""
        from kvalign.eval.tables import grouped

        model, same = document["settings"]["model"], ("cache_size", *self.by, "prompt")
        groups = grouped(document["rows"], itemgetter(*same))
        return [
            Panel(
                f"{model}, C = {cache_size}, prompt {prompt + 1}"
                + (f", no repeated {ngram}-gram" if ngram else ""),
                document["prompts"][prompt],
                [_passage(row) for row in rows],
            )
            for (cache_size, ngram, prompt), rows in groups.items()
        ]


def _passage(row: Row) -> Passage:
    from kvalign.eval.tables import label_of, method_name

    text, chunks = row["text"], row["chunks"]
    starts = [*(chunk[0] for chunk in chunks), len(text)]  # a piece reaches to the next one's start
    spans = zip(chunks, pairwise(starts), strict=True)
    pieces = [Piece(text[start:end], *chunk[2:]) for chunk, (start, end) in spans]
    return Passage(method_name(row), label_of(row), row["readable"], text[: starts[0]], pieces)


EVALUATION = Readability()
