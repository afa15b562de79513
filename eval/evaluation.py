"""What an evaluation is. `kvalign.eval.evaluations` has one a file; the command line, suites and
the report know each by its `Evaluation` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvalign.eval.settings import ComparisonSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvalign.eval.passages import Panel
    from kvalign.eval.tables import Table

Row = dict[str, Any]
Document = dict[str, Any]
Documents = Mapping[str, Document]
"""Documents of one evaluation by their names."""

Fields = tuple[tuple[str, Any], ...]
"""Names and types."""

SIZES = ("method", "aligner", "cache_size", "num_sinks", "num_evicted")
"""What tells a row of results from others: the first columns of every evaluation."""


@dataclass(frozen=True)
class Column:
    """A column of results.

    Attributes:
        title: its heading.
        digits: decimals of its figures; None: text.
        better: which direction is; "": it is a description.
        about: what the figure is.
        is_optional: a row may lack it.
    """

    title: str
    digits: int | None = 0
    better: Literal["lower", "higher", ""] = ""
    about: str = ""
    is_optional: bool = False

    @property
    def is_number(self) -> bool:
        return self.digits is not None

    def text(self, value: Any) -> str:
        return "" if value is None else f"{value:.{self.digits}f}"


@dataclass(frozen=True)
class Plot:
    """A figure, its file name without ending, and what it shows, for those who cannot see it."""

    name: str
    figure: Figure
    caption: str


@dataclass(frozen=True)
class Section:
    """A part of the report; `names` are those of the documents it is made of."""

    title: str
    about: str
    names: list[str]
    plots: list[Plot] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


class Evaluation:
    """One evaluation: what can be set, what it measures, and how that is shown.

    Attributes:
        settings: the class of its settings.
        run: from settings to the document.
        columns: what its tables show, by the name in a row.
        more_columns: what else it measures.
        heading, about: of its section of the report.
        in_summary: names of the columns that the report's summary shows, too.
        row_fields: what else is read of a row, and its type.
        document_fields: likewise of a document.
        settings_read: names of the settings that are read of a document, beside `model`.
    """

    settings: ClassVar[type[ComparisonSettings]]
    run: ClassVar[Callable[..., Document]]
    columns: ClassVar[Mapping[str, Column]]
    more_columns: ClassVar[tuple[tuple[str, Column], ...]] = ()
    heading: ClassVar[str]
    about: ClassVar[str]
    in_summary: ClassVar[tuple[str, ...]] = ()
    row_fields: ClassVar[Fields] = ()
    document_fields: ClassVar[Fields] = ()
    settings_read: ClassVar[tuple[str, ...]] = ()

    @property
    def all_columns(self) -> Mapping[str, Column]:
        return {**self.columns, **dict(self.more_columns)}

    @property
    def summary_columns(self) -> Mapping[str, Column]:
        return {name: self.columns[name] for name in self.in_summary}

    def check(self, document: Document) -> None:
        """Raise UserError for what the types of its fields do not say."""

    def chosen(self, documents: Documents) -> Documents:
        """Those whose figures stand in the summary."""
        return documents

    def rows(self, document: Document) -> list[Row]:
        """The rows of its tables: those of the document, or their means."""
        return document["rows"]

    def summary_rows(self, document: Document) -> list[Row]:
        """The rows of the summary: one for each method and its sizes."""
        return self.rows(document)

    def title(self, document: Document) -> str:
        """What its tables are of."""
        return str(document["settings"]["model"])

    def tables(self, document: Document) -> list[Table]:
        """A table for each cache size."""
        from kvalign.eval.tables import tables_by_cache

        return tables_by_cache(self.title(document), self.rows(document), self.columns)

    def figure(self, document: Document) -> tuple[Figure, str] | None:
        """A figure for the report and what it shows, if there is one."""
        return None

    def sections(self, documents: Documents) -> list[Section]:
        """Its parts of the report; those without a plot or a table are left out."""
        section = Section(self.heading, self.about, list(documents))
        for name, document in documents.items():
            if drawn := self.figure(document):
                section.plots.append(Plot(name, *drawn))
            section.tables.extend(self.tables(document))
        return [section]

    def panels(self, document: Document) -> list[Panel]:
        """Passages to show side by side."""
        return []
