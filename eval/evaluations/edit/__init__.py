"""Edit: tokens of a stream are cut, replaced or inserted, and what stands behind is not encoded
again. How well does the stream go on, and what does it cost?

    before | middle | after | future        edited: the middle is cut, replaced or inserted;
                                                    `piece`: inserted, encoded alone
                                            scored: the future
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from kvalign.eval.protocol import DrawnSettings, Evaluation, corpus_option
from kvalign.eval.protocol.data import Column, Document, Drawing, Row
from kvalign.eval.protocol.document import measures
from kvalign.foundation.errors import UserError
from kvalign.foundation.settings import MOST_ROWS, MOST_SIZE, option

if TYPE_CHECKING:
    from kvalign.methods.base import Method
    from kvalign.models.loading import LoadedModel

KINDS = ("cut", "replace", "insert")


@dataclass(frozen=True, kw_only=True)
class EditSettings(DrawnSettings):
    """Cut, replace and insert tokens in the middle of a stream without encoding what follows again:
    how well does it go on, and what does it cost?

    Example:
        kvalign eval edit --kinds cut --lengths 16 --num-edits 8
    """

    methods: tuple[str, ...] = option(
        ("streaming-llm", "kvalign"), help="methods that keep entries, comma-separated"
    )
    cache_sizes: tuple[int, ...] = option(
        (255,), help="entries the cache keeps, more than a text has, comma-separated", at_least=1
    )
    kinds: tuple[str, ...] = option(
        KINDS, help="kinds of edits, comma-separated", choices=(*KINDS, "piece")
    )
    lengths: tuple[int, ...] = option(
        (32,),
        help="tokens that are cut, replaced or inserted, a row each, comma-separated",
        at_least=1,
        at_most=MOST_SIZE,
    )
    exactly: tuple[int, ...] = option(
        (0, 16),
        help="tokens behind the edit, and first ones of a piece, that are encoded again, a row "
        "each, comma-separated",
        at_least=0,
        at_most=MOST_SIZE,
    )
    corpus: str = corpus_option("the text")
    num_before: int = option(64, help="tokens before", at_least=5, at_most=MOST_SIZE)
    num_after: int = option(64, help="tokens behind the edit", at_least=2, at_most=MOST_SIZE)
    num_future: int = option(32, help="tokens to score after them", at_least=1, at_most=MOST_SIZE)
    num_edits: int = option(
        200, help="edits of each kind and length", at_least=1, at_most=MOST_ROWS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        longest = self.num_before + max(self.lengths) + self.num_after + self.num_future
        if longest > min(self.cache_sizes):
            raise UserError(
                f"a text has {longest} tokens (--num-before, --lengths, --num-after and "
                "--num-future), which must all stay in the cache: give --cache-sizes of at least "
                f"{longest}"
            )


@measures(EditSettings)
def edit(settings: EditSettings, loaded: LoadedModel, methods: list[Method]) -> Iterable[Row]:
    """Edit the same texts with every method, and go on in each way.

    Returns:
        A document with a row for each method, kind, length and way: `COLUMNS`, the ratio with the
        ends of its 95 % interval over edits (ratio_low, ratio_high), num_edits and seconds.

    Raises:
        UserError: a method that cannot be edited; a corpus that is too short.
    """
    from kvalign.eval.evaluations.edit.ways import batches, score_edits, ways_of
    from kvalign.eval.protocol.grid import one_by_one, read_texts

    for method in methods:
        method.edit(0, 0)  # refused before any work, if it cannot be edited
    length = settings.num_before + settings.num_after + settings.num_future
    shape = settings.num_edits, length + 2 * max(settings.lengths)
    smaller = "--num-edits, --lengths, --num-before, --num-after or --num-future"
    ids = read_texts(loaded, settings.corpus, shape, smaller)
    ways = ways_of(settings.exactly)
    edits = [*product(dict.fromkeys(settings.kinds), dict.fromkeys(settings.lengths))]
    num_all = settings.num_edits * len(ways) * len(edits)
    for method, bar in one_by_one(methods, num_all, "streams"):
        for kind, num in edits:
            nums = (settings.num_before, num, settings.num_after, settings.num_future)
            yield from score_edits(method, loaded, kind, batches(ids, nums), ways, bar.update)


COLUMNS = {
    "kind": Column("edit", None, about="cut, replace, insert; piece: encoded alone"),
    "length": Column("tokens", about="that are cut, replaced or inserted"),
    "way": Column("goes on", None, about="what became of what follows"),
    # No way is the best: some know more of the text.
    "perplexity": Column("perplexity", 2, about="of the future"),
    "ratio": Column(
        "ratio",
        3,
        "",
        "perplexity by that of the text encoded anew; 95 % over edits, paired",
        ends=("ratio_low", "ratio_high"),
        by_reference=True,
    ),
    "agreement": Column("agreement", 3, "", "most likely tokens that are those of anew"),
    "encoded": Column("encoded", about="tokens of an edit that are encoded"),
    "edit_ms": Column("ms an edit", 1, "", "time of an edit of one stream, median"),
}


class EditEvaluation(Evaluation):
    settings = EditSettings
    run = staticmethod(edit)
    heading = "Edit"
    about = (
        "Tokens in the middle of a stream are cut, replaced or inserted. What stands behind is "
        "moved to its new places, and not encoded again. A piece has been encoded alone, before it "
        "is inserted. The table compares how the stream goes "
        "on with the same text encoded anew, with the stream that was not edited, and with one "
        "that forgets what stood behind."
    )
    columns = COLUMNS

    def figure(self, document: Document) -> Drawing | None:
        """Ratio to the text encoded anew, by way and edit."""
        from kvalign.eval.drawing import draw, panels_by

        ways = [*dict.fromkeys(row["way"] for row in document["rows"])]
        points = [
            row | {"at": ways.index(row["way"]), "edit": f"{row['kind']}, {row['length']} tokens"}
            for row in document["rows"]
        ]
        panels = panels_by("edit", points, "", "at", "ratio", "ratio_high", "ratio_low")
        figure = draw(panels, x="", y="perplexity, anew = 1", names=ways)
        title = "Perplexity relative to the text encoded anew"
        return figure, f"{title}: {self.title(document)}; bars: 95 %"


EVALUATION = EditEvaluation()
