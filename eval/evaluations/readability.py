"""Readability of texts, written by methods from the same prompts and seed, or by any program."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalign.eval.judging import (
    MAX_SPAN,
    MEASURES,
    RULES,
    SHA256,
    WORD_LIST,
    Rule,
    data_of,
    dense_perplexity,
    load_words,
)
from kvalign.eval.protocol import KEEP_PARTS, ComparisonSettings, Evaluation, seed_option
from kvalign.eval.protocol.data import (
    SIZES,
    Column,
    Document,
    Documents,
    Panel,
    Passage,
    PassagePart,
    Plot,
    Row,
    Section,
)
from kvalign.eval.protocol.document import document, kept, summary_of
from kvalign.eval.protocol.tables import grouped, label_of, means
from kvalign.foundation import progress
from kvalign.foundation.errors import UserError
from kvalign.foundation.files import read_json, read_text, write_json
from kvalign.foundation.settings import flag, keywords_of, option
from kvalign.foundation.statistics import MIN_RUNS, runs_interval

if TYPE_CHECKING:
    from kvalign.foundation.progress import Bar
    from kvalign.methods.base import Method
    from kvalign.models.loading import LoadedModel
    from kvalign.streaming.sampling import Sampling

log = logging.getLogger(__name__)

NAME = "readability"
KIND = f"eval {NAME}"


@dataclass(frozen=True, kw_only=True)
class ReadabilitySettings(ComparisonSettings):
    """Let methods continue prompts, or read finished texts, and judge them: dictionary words in
    chunks of 10 tokens (the paper's rule), repetition, perplexity under the model itself. With
    --page the result is a page, too: readable chunks green and others red, and strips of them as
    PNG and SVG.

    Example:
        kvalign eval readability --cache-sizes 32 --max-new-tokens 40
    """

    prompts: str = option(
        "own", help="prompts to continue: own, mt-bench, or a .jsonl file of turns"
    )
    max_new_tokens: int = option(600, help="tokens to generate for each prompt", at_least=1)
    top_k: int = option(
        20, help="draw from the k most likely tokens; 1 takes the most likely", at_least=1
    )
    rule: str = option(
        "paper",
        help="rule for readable: the paper's text, or its authors' code (a comma counts, a last "
        "chunk of fewer than 10 tokens does not)",
        choices=tuple(RULES),
    )
    seed: int = seed_option("the draws, the same for each method")
    text: tuple[str, ...] | None = option(
        None, help="text files to judge, comma-separated, from any program; no model is loaded"
    )
    num_prompts: int = option(1, help="number of prompts to continue", at_least=1)
    num_seeds: int = option(
        1,
        help=f"runs of each prompt, with --seed and the following seeds; {MIN_RUNS} runs are "
        "needed to compare methods, such as 4 prompts with 5 seeds",
        at_least=1,
    )
    no_repeat_ngram_sizes: tuple[int, ...] = option(
        (0, 2),
        help="never repeat an n-gram of this many of the model's tokens, a run each; 0: off",
        at_least=0,
    )
    page: Path | None = option(
        None,
        help="folder for a page, report.html, with its figures and the document",
        writes="folder",
    )
    keep: Path | None = KEEP_PARTS

    def __post_init__(self) -> None:
        super().__post_init__()
        idle = self.changed().keys() - {"text", "rule", "out", "csv", "page"}
        if self.text and idle:
            flags = ", ".join(sorted(map(flag, idle)))
            raise UserError(f"--text judges existing text: {flags} would have no effect")

    def as_dict(self) -> dict[str, Any]:
        """Return only the settings that count for finished texts."""
        values = super().as_dict()
        return {"model": None, "text": self.text, "rule": self.rule} if self.text else values


@keywords_of(ReadabilitySettings)
@progress.shown_as(KIND)
def readability(settings: ReadabilitySettings, *, loaded: LoadedModel | None = None) -> Document:
    """Let every method continue every prompt, and measure the passages; or measure texts. If `page`
    names a folder, write a page.

    Returns:
        A document with `prompts` (the continued texts), `rule` (name, about), `word_list` (name,
        num_words, sha256) and rows of the sizes, no_repeat_ngram_size, prompt (index), seed, and
        what `kvalign.eval.judging.chunks.judged` measures, num_tokens and dense_perplexity. For a
        text, its name is the method, and measures that need the model are None or missing.

    Raises:
        UserError: `page` already has results; a text that cannot be read.
    """
    page, settings = settings.page, dataclasses.replace(settings, page=None)
    file = page and page / f"{NAME}.json"
    # The same command again makes what was there, or what a run that was killed has not made.
    if file and file.exists() and read_json(file).get("command") != settings.command_line(KIND):
        raise UserError(f"{page} has results of readability already: name another --page")
    document = _of_texts(settings) if settings.text else _of_methods(settings, loaded)
    if page and file:
        from kvalign.eval.report.page import write_report

        page.mkdir(parents=True, exist_ok=True)
        write_json(file, document)
        write_report(page)
    return document


def _of_texts(settings: ReadabilitySettings) -> Document:
    """Finished texts, judged like passages of methods; torch is not needed."""
    from kvalign.eval.judging.chunks import judged

    started, words, rule = time.perf_counter(), load_words(), RULES[settings.rule]
    rows = []
    for name in settings.text or ():
        if not (text := read_text(Path(name))).strip():
            raise UserError(f"{name} has no text to judge")
        of_none = dict.fromkeys((*SIZES, "no_repeat_ngram_size"))
        rows.append(of_none | {"method": name, "prompt": 0} | judged(text, words, rule))
    more: dict[str, Any] = {"prompts": [""], "rule": rule.described, "word_list": WORD_LIST}
    return document(KIND, settings, rows, started=started, **more)


def _of_methods(settings: ReadabilitySettings, loaded: LoadedModel | None) -> Document:
    import torch

    from kvalign.data_gen.corpus import conversations
    from kvalign.eval.protocol.grid import load, losses_key, make_grid, one_by_one, sizes_of
    from kvalign.foundation.runs import keeping
    from kvalign.streaming.sampling import Sampling

    started = time.perf_counter()
    prompts = [turns[0] for turns in conversations(settings.prompts)]
    if (num := len(prompts)) < settings.num_prompts:
        log.warning("--num-prompts %d: %s has %d", settings.num_prompts, settings.prompts, num)
    prompts = prompts[: settings.num_prompts]
    load_words()  # another list than the pinned one is refused before any work
    rule = RULES[settings.rule]
    settings, loaded = load(settings, loaded)
    seeds = range(settings.seed, settings.seed + settings.num_seeds)
    runs = [*itertools.product(settings.no_repeat_ngram_sizes, range(len(prompts)), seeds)]
    num_tokens = len(runs) * settings.max_new_tokens
    rows = []
    with keeping(lambda: summary_of(settings.keep)):
        for method, bar in one_by_one(make_grid(settings, loaded.model), num_tokens, "tokens"):
            for ngram, number, seed in runs:
                sampling = Sampling(
                    max_new_tokens=settings.max_new_tokens,
                    top_k=settings.top_k,
                    no_repeat_ngram_size=ngram,
                    seed=seed,
                )
                key = {"prompt": prompts[number], "rule": rule.described, **vars(sampling)}
                end = bar.n + settings.max_new_tokens
                if settings.keep:
                    key["method"] = losses_key(method, torch.zeros(1, 0, dtype=torch.int64), True)
                write = partial(_written, method, prompts[number], sampling, loaded, rule, bar)
                (judged,) = kept(settings.keep, key, write)
                bar.update(end - bar.n)
                rows.append(
                    sizes_of(method)
                    | {"no_repeat_ngram_size": ngram, "prompt": number, "seed": seed}
                    | judged
                )
    more: dict[str, Any] = {"prompts": prompts, "rule": rule.described, "word_list": WORD_LIST}
    return document(KIND, settings, rows, started=started, **more)


def _written(
    method: Method, prompt: str, sampling: Sampling, loaded: LoadedModel, rule: Rule, bar: Bar
) -> list[Row]:
    """Let a method continue a prompt; return the judgement of the passage, with num_tokens and
    dense_perplexity, which is also low for repetitive text.
    """
    import torch

    from kvalign.eval.judging.chunks import judged
    from kvalign.streaming.text_stream import TextStream

    stream = TextStream(loaded.tokenizer, method, sampling)
    stream.feed(prompt)
    prompt_ids, start = list(stream.ids), bar.n
    for _ in stream:
        bar.update(start + len(stream.token_ids) - bar.n)
    text = loaded.tokenizer.decode(stream.token_ids, skip_special_tokens=True)
    span = min(loaded.spec.context_len or MAX_SPAN, MAX_SPAN)
    device = loaded.model.device
    before, passage = (torch.tensor(x, device=device) for x in (prompt_ids, stream.token_ids))
    perplexity = dense_perplexity(loaded.model, before, passage, span)
    figures = {"num_tokens": len(stream.token_ids), "dense_perplexity": perplexity}
    return [figures | judged(text, load_words(), rule)]


HUMAN = "a human's text"
COLUMNS = {
    "no_repeat_ngram_size": Column("no repeated n-gram", about="of the model's tokens"),
    "num_readable": Column("readable chunks"),
    "num_chunks": Column("chunks"),
    "num_passages": Column("passages"),
    **MEASURES,
}
ABOUT_TEXTS = (
    "The texts may come from any program. The rule counts words, not sense, so the repetition of "
    "4-grams of words stands beside it."
)


class Readability(Evaluation):
    settings = ReadabilitySettings
    run = staticmethod(readability)
    heading = "Readability"
    about = (
        "Every method continues the same prompts with the same seed. The rule counts words, "
        "not sense, so the repetition of 4-grams of words stands beside it. The n-grams that a "
        "run never repeats are of the model's tokens. Numbers are means over prompts and "
        "seeds; the passages below come from the first seed."
    )
    columns = COLUMNS

    def select(self, documents: Documents) -> Documents:
        """Documents of methods, without those of finished texts."""
        return {name: one for name, one in documents.items() if one["settings"]["model"]}

    def title(self, document: Document) -> str:
        return f"{document['settings']['model'] or 'texts'}, rule: {document['rule'].get('name')}"

    def rows(self, document: Document) -> list[Row]:
        if not document["settings"]["model"]:
            return document["rows"]
        by = ("no_repeat_ngram_size",)
        rows = means(document["rows"], MEASURES, by, ("num_readable", "num_chunks"))
        of_one = grouped(document["rows"], lambda row: tuple(map(row.get, (*SIZES, *by))))
        for row, runs in zip(rows, of_one.values(), strict=True):
            shares = [run["readable"] for run in runs]
            if interval := runs_interval(shares, row["num_chunks"]):
                row["readable_low"], row["readable_high"] = interval
        return rows

    def sections(self, documents: Documents) -> list[Section]:
        """Section with a figure for each cache size and prompt, the strips of all methods, and with
        the rules and the word lists of the documents.
        """
        plots, lines = [], []
        for name, one in documents.items():
            rule, words = one["rule"], one["word_list"]
            plots += self._strips(name, one)
            lines += [self.about if one["settings"]["model"] else ABOUT_TEXTS]
            lines.append(
                f"Rule {rule.get('name')}: {rule.get('about')} Word list: {words.get('name')}, "
                f"{words.get('num_words')} words, SHA-256 {words.get('sha256')}."
            )
        about = " ".join(dict.fromkeys(lines))
        section = Section.of(documents, self.heading, about, self.figure, self.tables)
        return [dataclasses.replace(section, plots=plots)]

    def _strips(self, name: str, document: Document) -> list[Plot]:
        """The plots of a document of that name, in which the n-gram rules are below each other."""
        from kvalign.eval.drawing import draw_chunks

        model, rule = document["settings"]["model"], document["rule"].get("name")
        plots = []
        groups = grouped(_of_first_seed(document), itemgetter("cache_size", "prompt"))
        for (cache_size, prompt), rows in groups.items():
            by_ngram = grouped(rows, "no_repeat_ngram_size")
            panels = {
                setting_of(ngram) or ("repetition allowed" if ngram == 0 else ""): group
                for ngram, group in by_ngram.items()
            }
            of = f"{model}, C = {cache_size}, prompt {prompt + 1}" if model else "texts"
            ending = f"-C{cache_size}-prompt{prompt + 1}" if model else ""
            caption = f"Chunks in order: {of}, rule {rule}"
            plots.append(Plot(f"{name}{ending}", draw_chunks(panels), caption))
        return plots

    def yardstick(self, document: Document) -> Row | None:
        """Text by Darwin (On the Origin of Species, 1859) under the document's rule: the scale of
        readability. None if the rule is not one of this version.
        """
        from kvalign.eval.judging.chunks import judged

        if (rule := RULES.get(document["rule"].get("name", ""))) is None:
            return None
        of_none = dict.fromkeys((*SIZES, "no_repeat_ngram_size"))
        return of_none | {"method": HUMAN} | judged(data_of("human.txt"), load_words(), rule)

    def panels(self, document: Document) -> list[Panel]:
        """Panels, one for each cache size, n-gram rule and prompt; texts share one."""
        model, panels = document["settings"]["model"], []
        groups = grouped(
            _of_first_seed(document), itemgetter("cache_size", "no_repeat_ngram_size", "prompt")
        )
        for (cache_size, ngram, prompt), rows in groups.items():
            of = [model, f"C = {cache_size}", f"prompt {prompt + 1}", setting_of(ngram)]
            title = ", ".join(filter(None, of)) if model else "texts"
            passages = [_passage(row, _unknown(row["text"], document)) for row in rows]
            panels.append(Panel(title, document["prompts"][prompt], passages))
        return panels

    def show(self, document: Document, settings: ReadabilitySettings) -> None:
        """Passages in colour, if a terminal shows them; the tables; the place of the page."""
        from kvalign.eval.report.page import PAGE, print_passages
        from kvalign.foundation.console import console_for

        if (console := console_for()).is_terminal:
            print_passages(self.panels(document), console)
        super().show(document, settings)
        if settings.page:
            print(f"report: {settings.page / PAGE}")


def setting_of(ngram: int | None) -> str:
    return f"no repeated {ngram}-gram" if ngram else ""


def _of_first_seed(document: Document) -> list[Row]:
    rows = document["rows"]
    return [row for row in rows if row.get("seed") == rows[0].get("seed")]


def _unknown(text: str, document: Document) -> list[tuple[int, int]]:
    """Unknown tokens of a text, if the document's words and rule are those of this version."""
    from kvalign.eval.judging.chunks import unknown

    rule = RULES.get(document["rule"].get("name", ""))
    is_same = rule and document["word_list"].get("sha256") == SHA256
    return unknown(text, load_words(), rule) if rule and is_same else []


def _passage(row: Row, unknown: list[tuple[int, int]]) -> Passage:
    text, chunks = row["text"], row["chunks"]
    starts = [*(chunk[0] for chunk in chunks), len(text)]  # a piece reaches to the next one's start
    if chunks and chunks[-1][1] < len(text.rstrip()):  # the rule judges whole chunks alone
        starts[-1] = chunks[-1][1]
    spans = zip(chunks, itertools.pairwise(starts), strict=True)
    pieces = []
    for (_, _, num_tokens, num_known, is_readable), (start, end) in spans:
        mine = tuple((a - start, b - start) for a, b in unknown if start <= a and b <= end)
        pieces.append(PassagePart(text[start:end], num_tokens, num_known, is_readable, mine))
    head, tail = text[: starts[0]], text[starts[-1] :]
    return Passage(label_of(row), row["readable"], head, pieces, tail)


EVALUATION = Readability()
