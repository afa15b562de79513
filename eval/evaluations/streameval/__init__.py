"""StreamEval: values registered in an endless text, each asked for some lines later.

    line 9: REGISTER_CONTENT is <48213>
    line 10: REGISTER_CONTENT is <70125>
    What is the REGISTER_CONTENT of line 8? <31744>
    line 11: REGISTER_CONTENT is <96581>

After StreamingLLM (Xiao et al. 2024, figures 8 and 9, table 7), whose authors published neither
texts nor code; the form is that of LongEval's line retrieval (Li et al. 2023).

An answer is the number and its `>`. It is scored by teacher forcing. All its tokens are the most
likely ones exactly if greedy decoding writes it, so `accuracy` is exact match. The text stays the
same for all methods, and the NLL of the answer grades models that never write it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvalign.eval.protocol import Column, Document, Drawing, Evaluation, Row, share_column
from kvalign.eval.protocol.document import measures
from kvalign.eval.protocol.settings import ComparisonSettings, seed_option
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import MOST_ITEMS, option

if TYPE_CHECKING:
    from kvalign.methods.base import Method
    from kvalign.models.loading import LoadedModel


@dataclass(frozen=True, kw_only=True)
class StreamEvalSettings(ComparisonSettings):
    """Ask for values that were registered some lines back in an endless stream: how far back can a
    method, and the model itself, read?

    Example:
        kvalign eval streameval --num-lines 20 --distances 0,5
    """

    distances: tuple[int, ...] = option(
        (0, 5, 10, 20, 40),
        help="distances to ask for, in lines back, a row each, comma-separated; 0: the latest line",
        at_least=0,
    )
    num_lines: int = option(
        200, help="lines of the stream, a value each", at_least=1, at_most=MOST_ITEMS
    )
    query_every: int = option(10, help="lines from one query to the next", at_least=1)
    seed: int = seed_option("the values, the same for each method and distance")

    def __post_init__(self) -> None:
        super().__post_init__()
        last = self.num_lines - self.num_lines % self.query_every
        if last <= max(self.distances):
            raise UserError(
                f"--num-lines {self.num_lines} and --query-every {self.query_every} put the last "
                f"query after line {last}, which must exceed the largest of --distances "
                f"({max(self.distances)}): raise --num-lines"
            )


@measures(StreamEvalSettings)
def streameval(
    settings: StreamEvalSettings, loaded: LoadedModel, methods: list[Method]
) -> Iterable[Row]:
    """Let every method read one stream for each distance, and score its answers.

    Returns:
        A document whose rows have the sizes, `COLUMNS` (means over the queries: distance_tokens
        from the value's end to its answer, in_cache if its line is wholly seen by the step that
        begins the answer, answer_nll_nats of an answer), num_queries, seconds.

    Raises:
        UserError: a stream too long for a method that does not evict.
    """
    from kvalign.eval.evaluations.streameval import scores
    from kvalign.eval.protocol.grid import one_by_one

    texts = (
        scores.pieces(settings.num_lines, settings.query_every, distance, settings.seed)
        for distance in dict.fromkeys(settings.distances)
    )
    streams = [scores.encode(text, loaded.tokenizer, loaded.model.device) for text in texts]
    for method in methods:
        scores.check_fits(method, streams)
    num_all = sum(one.piece.is_query for stream in streams for one in stream)
    for method, bar in one_by_one(methods, num_all, "queries"):
        for stream in streams:
            yield scores.score(method, stream, bar.update)


COLUMNS = {
    "distance_lines": Column("lines back", is_key=True),
    "accuracy": share_column("accuracy", "accuracy", "share of queries answered exactly"),
    # No merit as long as no answer is right: it is low for what guesses digits well.
    "answer_nll_nats": Column("answer NLL, nats", 3, about="loss of the right answer"),
    "in_cache": Column("in cache", 2, about="share of queries whose line is still in the cache"),
    "distance_tokens": Column("tokens back", 1, about="from the value to its answer"),
}


class StreamEval(Evaluation):
    settings = StreamEvalSettings
    run = staticmethod(streameval)
    heading = "StreamEval"
    about = (
        "Lines register numbers, and every few lines a query asks for the number some lines back. "
        "An answer is right if greedy decoding gives it exactly. Its loss also distinguishes "
        "models that give no right answers. No method can answer about a line that is no longer in "
        "the cache."
    )
    in_summary = ("accuracy", "answer_nll_nats")
    columns = COLUMNS

    def figure(self, document: Document) -> Drawing | None:
        from kvalign.eval.drawing import draw, panels_by

        title, rows = self.title(document), document["rows"]
        if len({row["distance_lines"] for row in rows}) == 1 or not any(
            r["accuracy"] for r in rows
        ):
            return None
        names = ("distance_lines", "answer_nll_nats")
        panels = panels_by("cache_size", rows, f"{title}, C = ", *names)
        figure = draw(panels, x="lines back", y="loss of the right answer, nats")
        return figure, f"Loss of the right answer against distance: {title}"


EVALUATION = StreamEval()
