"""Data of evaluations, which reports show: rows and documents of results, columns, tables, plots,
sections, and passages side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvalign.foundation.console import Entry

Row = dict[str, Any]
Document = dict[str, Any]
Documents = Mapping[str, Document]
"""Documents of one evaluation by their names."""

OF_POLICY = ("policy", "num_recent", "positions", "cache_dtype", "memory", "num_recalled")
"""Sizes of methods that take a policy."""

SIZES = (
    "method",
    "aligner",
    "aligner_label",
    "aligner_path",
    "aligner_revision",
    "cache_size",
    "num_sinks",
    "num_evicted",
    "realign_every",
    *OF_POLICY,
)
"""Fields that identify a row of results, the first columns of every evaluation: the method; its
aligner's name, which is unique among the rows, its label (kind and objective), shipped name, folder
or hub id as given, and commit or digits of its weights' SHA-256; and sizes. Older documents lack
the last of these.
"""

FLOOR = "bare"
"""`method` of the bare step, a lower bound for all methods: marked as such, never the best."""

PEER = "llama.cpp"
"""`method` of a row of another program, timed beside ours."""


@dataclass(frozen=True)
class Column:
    """A column of results.

    Attributes:
        title: its heading.
        digits: decimals of its figures; None: text.
        better: the better direction; "": it is a description.
        about: meaning of the figure.
        ends: names of the ends of its interval in a row. They are shown beside it; the best one
            is marked if its interval overlaps no other.
        by_reference: it is relative to the reference, so a slow reference is never the best.
    """

    title: str
    digits: int | None = 0
    better: Literal["lower", "higher", ""] = ""
    about: str = ""
    ends: tuple[str, str] | None = None
    by_reference: bool = False

    @property
    def is_number(self) -> bool:
        return self.digits is not None

    def text(self, value: Any) -> str:
        if value is None or self.digits is None:
            return value or ""
        return f"{value:.{self.digits}f}"

    def interval(self, row: Row) -> tuple[float, float] | None:
        """Interval in a row, if it has one; infinite with too few labels."""
        low, high = (row.get(name) for name in self.ends or ("", ""))
        return None if low is None else (low, math.inf if high is None else high)


def share_column(
    name: str, title: str, about: str, better: Literal["higher", ""] = "higher"
) -> Column:
    """The column of a share as `kvalign.foundation.statistics.share_of` gives it."""
    return Column(title, 3, better, f"{about}; 95 %", (f"{name}_low", f"{name}_high"))


@dataclass(frozen=True)
class Table:
    """Rows of entries; `note` answers a reader's likely question."""

    title: str
    columns: list[Column]
    rows: list[list[Entry]]
    note: str = ""


class Plot(NamedTuple):
    """Figure with its file name without ending, its caption, and what stands above it."""

    name: str
    figure: Figure
    caption: str
    heading: str = ""


Drawing = tuple["Figure", str]
"""Figure and caption: the fields after a plot's name."""


@dataclass(frozen=True)
class Section:
    """A part of the report; `names` are those of its documents."""

    title: str
    about: str
    names: list[str]
    plots: list[Plot]
    tables: list[Table]

    @classmethod
    def of(
        cls,
        documents: Documents,
        title: str,
        about: str,
        figure: Callable[[Document], Drawing | None],
        tables: Callable[[Document], list[Table]] = lambda document: [],
        suffix: str = "",
    ) -> Section:
        """Section with a figure and tables of each document, as far as there are."""
        figures = {f"{name}{suffix}": figure(document) for name, document in documents.items()}
        plots = [Plot(name, *one) for name, one in figures.items() if one]
        all_tables = [table for document in documents.values() for table in tables(document)]
        return cls(title, about, list(documents), plots, all_tables)


class PassagePart(NamedTuple):
    """Chunk of a passage, up to the next; `unknown` has the ends of words that are unknown."""

    text: str
    num_tokens: int
    num_known: int
    is_readable: bool
    unknown: tuple[tuple[int, int], ...] = ()


class Passage(NamedTuple):
    """Text that one method wrote: the part before the first chunk, the chunks, and the rest."""

    label: str
    readable: float
    head: str
    pieces: list[PassagePart]
    tail: str = ""


class Panel(NamedTuple):
    """The passages of all methods for one prompt."""

    title: str
    prompt: str
    passages: list[Passage]
