"""Conversations through one stream, turn after turn, as StreamingLLM streams MT-Bench (Xiao et al.
2024): is the tenth answer still language? It measures fluency, not whether an answer is right.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvalign.eval.judging import MEAN_COLUMNS, JudgedText, WritingSettings, judge
from kvalign.eval.judging.words import RULES, load_words
from kvalign.eval.protocol import Column, Document, Drawing
from kvalign.eval.protocol.document import document
from kvalign.eval.protocol.tables import grouped
from kvalign.foundation import progress
from kvalign.foundation.settings import keywords_of, option

if TYPE_CHECKING:
    from kvalign.models.loading import LoadedModel


@dataclass(frozen=True, kw_only=True)
class ChatSettings(WritingSettings):
    """Feed turns one after another through one endless stream and judge each answer: how fluent it
    stays, not whether it is right.

    Example:
        kvalign eval chat --cache-sizes 32 --num-turns 2 --max-new-tokens 30
    """

    prompts: str = option(
        "own", help="conversations: own, talk, mt-bench, or a .jsonl file of turns"
    )
    num_turns: int = option(8, help="number of turns to feed", at_least=1)
    max_new_tokens: int = option(100, help="most tokens of an answer", at_least=1)


@keywords_of(ChatSettings)
@progress.shown_as("eval chat")
def chat(settings: ChatSettings, *, loaded: LoadedModel | None = None) -> Document:
    """Feed the same turns to one stream of each method, and measure its answers.

    Returns:
        A document with `turns` (the user's), `rule` and `word_list` (name, num_words, sha256), and
        a row for each answer: the sizes, answer (index), num_fed (tokens of the stream before it),
        and the measures of `kvalign.eval.judging.judge`.
    """
    from kvalign.data_gen.prompts import conversations
    from kvalign.eval.protocol.grid import load, make_grid, one_by_one, sizes_of
    from kvalign.streaming.text_stream import TextStream
    from kvalign.streaming.turns import turn_ids

    started = time.perf_counter()
    turns = [turn for conversation in conversations(settings.prompts) for turn in conversation]
    turns = settings.first(turns, "num_turns")
    words, rule = load_words(), RULES[settings.rule]
    settings, loaded = load(settings, loaded)
    rows = []
    for method, bar in one_by_one(make_grid(settings, loaded.model), len(turns), "answers"):
        stream = TextStream(loaded.tokenizer, method, settings.sampling(stop_at_end=True))
        for number, turn in enumerate(turns):
            prompt_ids = turn_ids(loaded.tokenizer, turn, is_first=number == 0)
            stream.feed(prompt_ids)
            num_fed = len(stream.ids)
            for _ in stream:
                pass
            rows.append(
                sizes_of(method)
                | {"answer": number, "num_fed": num_fed}
                | judge(loaded, prompt_ids, stream.token_ids, rule)
            )
            bar.update(1)
    more: dict[str, Any] = {"turns": turns, "rule": rule.described, "word_list": words.about}
    return document("eval chat", settings, rows, started=started, **more)


class Chat(JudgedText):
    settings = ChatSettings
    run = staticmethod(chat)
    heading = "Conversations in one stream"
    about = (
        "Turns go one after another through one endless stream. Each answer is judged by its "
        "words, not by whether it is right."
    )
    columns = MEAN_COLUMNS

    @property
    def summary_columns(self) -> dict[str, Column]:
        title, about = "readable in chat", "share of readable chunks of the answers"
        column = replace(MEAN_COLUMNS["readable"], title=title, about=about)
        return {"readable": column}

    def figure(self, document: Document) -> Drawing:
        from kvalign.eval.drawing import draw_answers

        title, groups = document["settings"]["model"], grouped(document["rows"], "cache_size")
        panels = {f"{title}, C = {size}": group for size, group in groups.items()}
        caption = f"Readable chunks of each answer, in %, in order: {title}"
        return draw_answers(panels), caption


EVALUATION = Chat()
