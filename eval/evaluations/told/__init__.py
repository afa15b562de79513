"""Told: a conversation states eight facts in its first turns, and asks for them after other talk.

    user: The dog of the teacher is called Biscuit.     assistant: I see.
    ...                                                 other talk: passages of a text
    user: What is the dog of the teacher called?        assistant: The dog of the teacher is called

All turns are given, those of the assistant too. An answer is right if, among the eight possible
words, the one that was told is the most likely. One in eight is right by chance. So a small model
that writes badly still shows what it can read. Questions are asked on a copy of the stream, so they
do not affect each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvalign.eval.protocol import Column, Document, Drawing, Evaluation, Row, share_column
from kvalign.eval.protocol.document import measures
from kvalign.eval.protocol.settings import ComparisonSettings, plot_option, seed_option
from kvalign.foundation import progress
from kvalign.foundation.settings import MOST_ROWS, MOST_SIZE, option

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvalign.methods.base import Method
    from kvalign.models.loading import LoadedModel


@dataclass(frozen=True, kw_only=True)
class ToldSettings(ComparisonSettings):
    """State eight facts at the beginning of a conversation, and ask for them after other talk: what
    does a stream still know? For models that answer (`--model smollm2-135m-instruct`).

    Example:
        kvalign eval told --cache-sizes 32 --talk 1,4 --num-conversations 1
    """

    methods: tuple[str, ...] = option(
        ("dense", "streaming-llm", "discard-half"),
        help="methods, comma-separated; dense only within the context length",
    )
    corpus: str = option(
        "python-docs",
        help="text that the other talk quotes: python-docs, wikitext, hub:NAME, text:PATH, ...",
    )
    talk: tuple[int, ...] = option(
        (4, 16, 64),
        help="tokens of other talk before the questions, in cache sizes, a row each",
        at_least=0,
        at_most=MOST_SIZE,
    )
    passage_len: int = option(
        400,
        help="tokens of the corpus in a turn of other talk; more turns are harder",
        at_least=1,
        at_most=MOST_SIZE,
    )
    num_conversations: int = option(
        4, help="conversations of eight facts each", at_least=1, at_most=MOST_ROWS
    )
    seed: int = seed_option("the facts, the same for each method")
    plot: Path | None = plot_option("right answers against other talk")


@measures(ToldSettings)
def told(settings: ToldSettings, loaded: LoadedModel, methods: list[Method]) -> Iterable[Row]:
    """Let every method read the same conversations, and count right answers.

    Returns:
        A document with a row for each method, its sizes and `talk` (cache sizes of other talk):
        `COLUMNS` with the ends of their 95 % intervals (NAME_low, NAME_high), num_questions,
        num_tokens (mean length of the conversation before the questions) and seconds. A method that
        does not evict has no row beyond its context length.

    Raises:
        UserError: a corpus that is too short, a tokenizer that does not tell the answers apart.
    """
    from kvalign.eval.evaluations.told.conversation import conversations, is_right
    from kvalign.eval.protocol.grid import one_by_one
    from kvalign.eval.protocol.questions import rows_of

    progress.phase(f"reading {settings.corpus}")
    talks = conversations(settings, loaded)
    stages = sorted(set(settings.talk))
    for method, bar in one_by_one(methods, len(talks) * len(stages), "rounds of questions"):
        stops = [talk.stops(stages, method.sizes.cache_size) for talk in talks]
        yield from rows_of(method, stops, is_right, "talk", bar)


CHANCE = "0.125 by chance"
COLUMNS = {
    "talk": Column("other talk", about="tokens, in cache sizes", is_key=True),
    "accuracy": share_column(
        "accuracy", "right of eight", f"answers whose word is the likeliest of eight, {CHANCE}"
    ),
    "exact": share_column(
        "exact", "right of all", "answers whose word is the likeliest of all tokens"
    ),
    "num_tokens": Column("tokens", about="mean length of the conversation before the questions"),
}


class Told(Evaluation):
    settings = ToldSettings
    run = staticmethod(told)
    heading = "Told in conversation"
    about = (
        "Eight facts are stated in the first turns of a conversation and asked for after other "
        "talk, on a copy of the stream. All turns are given. An answer is right if the word "
        f"that was told is the likeliest of the eight possible ones: {CHANCE}."
    )
    in_summary = ("accuracy",)
    columns = COLUMNS

    def figure(self, document: Document) -> Drawing | None:
        if len({row["talk"] for row in document["rows"]}) == 1:
            return None
        caption = f"Right answers against other talk, 95 %: {self.title(document)}"
        return self.plot(document), caption

    def plot(self, document: Document) -> Figure:
        """Right answers against other talk, in a panel for each cache size."""
        from kvalign.eval.drawing import draw, panels_by

        title, rows = self.title(document), document["rows"]
        names = ("talk", "accuracy", "accuracy_high", "accuracy_low")
        panels = panels_by("cache_size", rows, f"{title}, C = ", *names)
        x, y = "other talk, cache sizes", "right answers (by chance 1 in 8)"
        return draw(panels, x=x, y=y, doubling_x=all(row["talk"] for row in rows))


EVALUATION = Told()
