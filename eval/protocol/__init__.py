"""Base of an evaluation: the only interface for the command line, suites and the report. Modules
are shared by all: settings, the grid of methods, the document of results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from kvalign.eval.protocol.settings import ResultSettings

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
or hub id as given, and commit or digits of its weights' SHA-256; and sizes. Rows of older documents
lack the label, path, revision, `realign_every` and what is `OF_POLICY`.
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
        by_reference: it is relative to the reference, so the reference is never the best.
        is_key: it distinguishes rows of one method; the summary has means over its values.
    """

    title: str
    digits: int | None = 0
    better: Literal["lower", "higher", ""] = ""
    about: str = ""
    ends: tuple[str, str] | None = None
    by_reference: bool = False
    is_key: bool = False

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
    """The column of a share as `kvalign.eval.protocol.statistics.share_of` gives it."""
    return Column(title, 3, better, f"{about}; 95 %, Wilson", (f"{name}_low", f"{name}_high"))


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


class Piece(NamedTuple):
    """Chunk of a passage, up to the next; `unknown` has the ends of words that are unknown."""

    text: str
    num_tokens: int
    num_known: int
    is_readable: bool
    unknown: tuple[tuple[int, int], ...] = ()

    @property
    def parts(self) -> list[tuple[str, bool]]:
        """Text in parts, each with whether it is an unknown token."""
        parts, done = [], 0
        for start, end in self.unknown:
            parts += [(self.text[done:start], False), (self.text[start:end], True)]
            done = end
        return [(text, mark) for text, mark in [*parts, (self.text[done:], False)] if text]


class Passage(NamedTuple):
    """Text that one method wrote: the part before the first chunk, the chunks, and the rest."""

    method: str
    label: str
    readable: float
    head: str
    pieces: list[Piece]
    tail: str = ""


class Panel(NamedTuple):
    """The passages of all methods for one prompt."""

    title: str
    prompt: str
    passages: list[Passage]


class Evaluation:
    """Evaluation: its settings, its measurement, and how results are shown.

    Attributes:
        settings: the class of its settings.
        run: from settings to the document.
        columns: those of its tables, by their name in a row.
        heading, about: of its section of the report.
        in_summary: names of the columns that the report's summary shows, too.
    """

    settings: ClassVar[type[ResultSettings]]
    run: ClassVar[Callable[..., Document]]
    columns: ClassVar[Mapping[str, Column]]
    heading: ClassVar[str]
    about: ClassVar[str]
    in_summary: ClassVar[tuple[str, ...]] = ()

    @property
    def summary_columns(self) -> Mapping[str, Column]:
        return {name: self.columns[name] for name in self.in_summary}

    def select(self, documents: Documents) -> Documents:
        """Documents whose figures are in the summary."""
        return documents

    def rows(self, document: Document) -> list[Row]:
        """The rows of its tables: those of the document, or their means."""
        return document["rows"]

    def summary_rows(self, document: Document) -> list[Row]:
        """Rows of the summary: one for each method and its sizes, means over other differences."""
        from kvalign.eval.protocol.tables import means

        rows = self.rows(document)
        has_keys = any(column.is_key for column in self.columns.values())
        return means(rows, self.in_summary) if has_keys else rows

    def title(self, document: Document) -> str:
        """Return the title of its tables."""
        return str(document["settings"]["model"])

    def tables(
        self, document: Document, columns: Mapping[str, Column] | None = None
    ) -> list[Table]:
        """Table for each cache size, of all columns or of the given ones, so that the best is among
        methods that keep equally many entries; texts without a method have none.
        """
        from kvalign.eval.protocol.tables import grouped, table

        reference, of = document["settings"].get("reference"), self.title(document)
        groups = grouped(self.rows(document), "cache_size")
        titles = [f"{of}, C = {size}" if size else of for size in groups]
        pairs = zip(titles, groups.values(), strict=True)
        return [table(title, rows, columns or self.columns, reference) for title, rows in pairs]

    def figure(self, document: Document) -> Drawing | None:
        """Figure for the report, with its caption, if there is one."""
        return None

    def plot(self, document: Document) -> Figure:
        """Return the figure that `--plot` draws, of one size or distance, too."""
        drawing = self.figure(document)
        assert drawing
        return drawing[0]

    def sections(self, documents: Documents) -> list[Section]:
        """Sections of the report; those without a plot or a table are left out."""
        return [Section.of(documents, self.heading, self.about, self.figure, self.tables)]

    def panels(self, document: Document) -> list[Panel]:
        """Passages to show side by side."""
        return []

    def prepared(self, settings: Any) -> Any:
        """Settings for a run whose results are shown, not printed as a document."""
        return settings

    def show(self, document: Document, settings: Any) -> None:
        """Print the results of a run with the prepared settings."""
        from kvalign.eval.report.page import print_meanings, print_tables

        print_tables(tables := self.tables(document))
        print_meanings(tables)
