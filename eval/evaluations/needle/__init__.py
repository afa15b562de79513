"""Needle: codes hidden in a real text, each asked for some distance later.

    ... text ... The secret code of the red door is 48213 . Remember : ... 48213 . ... text ...
    The secret code of the red door is                       asked for 1, 4, 16, 64 C later

An answer is right if the model itself, with greedy decoding, writes the code. Questions are asked
on a copy of the stream, so they do not affect each other. After G. Kamradt's needle in a haystack
(2023), adapted to streams: the distance counts, since an endless text has no length.

Other kinds of questions are those of RULER (Hsieh et al. 2024, arXiv 2404.06654) that need no data
set (`kinds`), with its score: the share of the expected answers that a written one contains.
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

COLOURS = "black blue brown golden green grey orange pink purple red white yellow"
THINGS = "bag bicycle boat box car chest cupboard door gate house locker suitcase"
NAMES = [f"{colour} {thing}" for colour in COLOURS.split() for thing in THINGS.split()]
"""Owners of the codes; each code of a stream has its own."""
KINDS = {
    "single": 1,
    "multi-key": 4,
    "multi-value": 1,
    "multi-query": 4,
    "variable-tracking": 0,
    "common-words": 0,
    "frequent-words": 0,
}
"""Kinds of questions, and how many names one is about."""


@dataclass(frozen=True, kw_only=True)
class NeedleSettings(ComparisonSettings):
    """Hide codes in a real text, and ask for each some distance later: how far back a stream can
    read. For models that copy from their context (`--model smollm2-135m-instruct`).

    Example:
        kvalign eval needle --cache-sizes 32 --distances 1,4 --num-streams 2
    """

    methods: tuple[str, ...] = option(
        ("dense", "streaming-llm", "discard-half"),
        help="methods, comma-separated; dense only within the context length",
    )
    corpus: str = option(
        "python-docs", help="the text around the codes: python-docs, wikitext, text:PATH, ..."
    )
    distances: tuple[int, ...] = option(
        (1, 4, 16, 64),
        help="distances from a code to its question, in cache sizes, a row each",
        at_least=0,
        at_most=MOST_SIZE,
    )
    kinds: tuple[str, ...] = option(
        ("single",),
        help="kinds of questions, RULER's, a row each, comma-separated",
        choices=KINDS,
    )
    num_needles: int = option(
        1,
        help="codes (of other kinds: passages) of a stream, near its beginning; small models "
        "confuse several",
        at_least=1,
        at_most=len(NAMES) // max(KINDS.values()),
    )
    gap: int = option(100, help="tokens of text before each code", at_least=0, at_most=MOST_SIZE)
    num_streams: int = option(
        10, help="streams, each with its own text", at_least=1, at_most=MOST_ROWS
    )
    seed: int = seed_option("the codes, the same for each method")
    plot: Path | None = plot_option("methods against distance")


@measures(NeedleSettings)
def needle(settings: NeedleSettings, loaded: LoadedModel, methods: list[Method]) -> Iterable[Row]:
    """Let every method read the same streams, and count the codes that it finds.

    Returns:
        A document with a row for each method, its sizes, `kind` (unless all are `single`) and
        `distance` (cache sizes): `accuracy` with the ends of its 95 % interval (accuracy_low,
        accuracy_high), num_questions, num_tokens (mean length of the stream before the question),
        distance_tokens and seconds. A method that does not evict has no row for a distance whose
        questions exceed its context length.

    Raises:
        UserError: a corpus that is too short, a tokenizer that cannot write words.
    """
    from kvalign.eval.evaluations.needle.haystack import asker, haystacks
    from kvalign.eval.protocol.grid import one_by_one
    from kvalign.eval.protocol.questions import rows_of

    progress.phase(f"reading {settings.corpus}")
    by_kind = haystacks(settings, loaded)
    distances = set(settings.distances)
    num_all = len(by_kind) * settings.num_streams * settings.num_needles * len(distances)
    for method, bar in one_by_one(methods, num_all, "questions"):
        size = method.sizes.cache_size
        for kind, streams in by_kind.items():
            of_kind = {} if {*by_kind} == {"single"} else {"kind": kind}
            stops = [stream.stops(distances, size) for stream in streams]
            for row in rows_of(method, stops, asker(kind, loaded), "distance", bar):
                yield row | of_kind | {"distance_tokens": row["distance"] * size}


COLUMNS = {
    "kind": Column("kind", None, about="of question, RULER's", is_key=True),
    "distance": Column(
        "distance", about="from the code to its question, in cache sizes", is_key=True
    ),
    "accuracy": share_column(
        "accuracy",
        "found",
        "codes that greedy decoding writes with all digits; of other kinds, expected answers that "
        "48 tokens of it contain",
    ),
    "distance_tokens": Column("tokens back", about="from the code to its question"),
}


class NeedleEvaluation(Evaluation):
    settings = NeedleSettings
    run = staticmethod(needle)
    heading = "Needle in a stream"
    about = (
        "Codes of five digits are hidden in a text, and each is asked for some distance later, "
        "on a copy of the stream. An answer is right if greedy decoding writes all digits. "
        "None is right by chance. Other kinds of questions are RULER's: the figure is the share of "
        "the expected answers that 48 tokens of greedy decoding contain."
    )
    in_summary = ("accuracy",)
    columns = COLUMNS

    def figure(self, document: Document) -> Drawing | None:
        if len({row["distance"] for row in document["rows"]}) == 1:
            return None
        return self.plot(document), f"{_found(document)}, %: {self.title(document)}"

    def plot(self, document: Document) -> Figure:
        """Heat map for each cache size and kind: methods, distances, and the share found."""
        from kvalign.eval.drawing import draw_shares
        from kvalign.eval.protocol.tables import grouped, label_of

        title, rows = self.title(document), document["rows"]
        distances = sorted({row["distance"] for row in rows})
        panels = {}
        groups = grouped(rows, lambda row: (row["cache_size"], row.get("kind")))
        for (size, kind), group in groups.items():
            shares = {
                label: [
                    next((row["accuracy"] for row in of_label if row["distance"] == d), None)
                    for d in distances
                ]
                for label, of_label in grouped(group, label_of).items()
            }
            name = f"{title}, C = {size}" + (f", {kind}" if kind else "")
            panels[name] = shares, [f"{d} C" for d in distances]
        found = _found(document).lower()
        return draw_shares(panels, x=f"from what is hidden to its question; {found} in %")


def _found(document: Document) -> str:
    return "Answers found" if document["rows"][0].get("kind") else "Codes found"


EVALUATION = NeedleEvaluation()
