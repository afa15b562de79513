"""What an evaluation is. `kvalign.eval.evaluations` has one a file; the command line, suites and
the report know each by its `Evaluation` alone.
"""

from __future__ import annotations

import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NotRequired, TypeVar

from annotated_types import Ge, MinLen
from typing_extensions import TypedDict  # pydantic reads typing's from Python 3.12

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvalign.eval.passages import Panel
    from kvalign.eval.tables import Table

Row = dict[str, Any]
Document = dict[str, Any]
Documents = Mapping[str, Document]
"""Documents of one evaluation by their names."""


@dataclass(frozen=True)
class Column:
    """A column of results: its title, the decimals of its figures (None: text), which direction is
    better ("": it is a description), and what the figure is.
    """

    title: str
    digits: int | None = 0
    better: Literal["lower", "higher", ""] = ""
    about: str = ""

    @property
    def is_number(self) -> bool:
        return self.digits is not None

    def text(self, value: Any) -> str:
        return "" if value is None else f"{value:.{self.digits}f}"


class SizedRow(TypedDict):
    """What tells a row of results from others. A subclass has the figures, annotated with the
    `Column` that shows them; rows may hold more.
    """

    __pydantic_config__ = {"extra": "allow"}  # type: ignore[misc]  # noqa: RUF012

    method: str
    aligner: str | None
    cache_size: Annotated[int, Ge(1)]
    num_sinks: int
    num_evicted: int


class ModelNamed(TypedDict):
    """The least that the report reads of a document's settings."""

    __pydantic_config__ = {"extra": "allow"}  # type: ignore[misc]  # noqa: RUF012

    model: str


R = TypeVar("R")
Rows = Annotated[list[R], MinLen(1)]


class ReadDocument(TypedDict):
    """What is read of every document (see `kvalign.eval.document`). A subclass adds `settings`, a
    `ModelNamed`, and `rows`, which are `Rows` of its own.
    """

    kind: str
    command: str
    environment: dict[str, Any]


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


class Evaluation(ABC):
    """One evaluation: what can be set, what it measures, and how that is shown.

    Attributes:
        settings: the class of its settings.
        columns: what its tables show, by the name in a row.
        document: the `ReadDocument` that its documents must be.
        in_summary: names of the columns that the report's summary shows, too.
    """

    settings: ClassVar[type[Any]]
    columns: ClassVar[dict[str, Column]]
    document: ClassVar[Any]
    in_summary: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def run(self, settings: Any) -> Document:
        """Measure, and return the document.

        Raises:
            UserError: wrong settings, said before any work.
        """

    @abstractmethod
    def sections(self, documents: Documents) -> list[Section]:
        """Its part of the report. A section without a plot or a table is left out."""

    @property
    def summary_columns(self) -> dict[str, Column]:
        return {name: self.columns[name] for name in self.in_summary}

    def check(self, document: Document) -> None:  # noqa: B027
        """Raise UserError for what the types of `document` do not say."""

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
        """What its tables and plots are of."""
        return str(document["settings"]["model"])

    def tables(self, document: Document, of: Mapping[str, Column] | None = None) -> list[Table]:
        """A table for each cache size, of all columns unless some are given."""
        from kvalign.eval.tables import tables_by_cache

        return tables_by_cache(self.title(document), self.rows(document), of or self.columns)

    def panels(self, document: Document) -> list[Panel]:
        """Passages to show side by side."""
        return []


def columns_of(row: type) -> dict[str, Column]:
    """The columns that the fields of a TypedDict are annotated with, in their order."""
    columns = {}
    for name, hint in typing.get_type_hints(row, include_extras=True).items():
        if typing.get_origin(hint) is NotRequired:
            (hint,) = typing.get_args(hint)
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, Column):
                columns[name] = note
    return columns
