"""Base of an evaluation: the only interface for the command line, suites and the report. Modules
are shared by all: settings, the grid of methods, the document of results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvalign.cache.sizes import OF_MEMORY, CacheSizes, num_evicted_of
from kvalign.eval.protocol.data import (
    Column,
    Document,
    Documents,
    Drawing,
    Panel,
    Row,
    Section,
    Table,
)
from kvalign.eval.protocol.tables import grouped, print_meanings, print_tables, table
from kvalign.foundation.errors import UserError
from kvalign.foundation.names import unknown
from kvalign.foundation.settings import MOST_SEED, ModelSettings, Settings, flag, like, option
from kvalign.methods.registry import METHODS
from kvalign.policies import OLDEST

SEVERAL = "; several, comma-separated"


def seed_option(of: str, default: int = 0) -> int:
    seed: int = option(default, help=f"seed of {of}", at_least=0, at_most=MOST_SEED)
    return seed


def corpus_option(what: str) -> str:
    corpus: str = option("python-docs", help=f"{what}: python-docs, wikitext, text:PATH, hub:NAME")
    return corpus


METHODS_AND_DENSE: tuple[str, ...] = option(
    ("dense", "streaming-llm", "discard-half"),
    help="methods, comma-separated; dense only within the context length",
)
KEEP_PARTS: Path | None = option(
    None,
    help="folder that keeps each part as it ends (latency: a cache size; readability: a passage); "
    "parts in it are not made again",
    writes="folder",
)


@dataclass(frozen=True, kw_only=True)
class ResultSettings(Settings):
    """Base of the settings of everything that makes a document of results."""

    out: Path | None = option(
        None, help="also write the document, as --json prints it, to a .json file", writes="file"
    )
    csv: Path | None = option(
        None, help="also write the table, a line for each row, to a .csv file", writes="file"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        endings = {"out": (".json",), "csv": (".csv",), "plot": (".png", ".svg")}
        for name, of_file in endings.items():
            path: Path | None = getattr(self, name, None)
            if path and path.suffix not in of_file:
                raise UserError(
                    f"{flag(name)} takes a path ending in {' or '.join(of_file)}, got {str(path)!r}"
                )


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings(ResultSettings, ModelSettings):
    """Base of the settings of evaluations: methods and sizes."""

    num_sinks: tuple[int, ...] | None = option(
        None,
        help="first entries that are never evicted, of all methods but window; several, "
        "comma-separated (default: the most that an aligner has; without one, the most that a "
        "method has by default)",
        at_least=0,
    )
    protocol: str = option(
        "common",
        help="common: all methods have equal sinks, and perplexities the same labels at all cache "
        "sizes; paper: as in the KV-Align paper, each method has its own default of sinks, and "
        "each cache size its own labels",
        choices=("common", "paper"),
    )
    methods: tuple[str, ...] = option(
        ("window", "streaming-llm", "kvalign", "discard-half", "recompute"),
        help="methods, comma-separated; the default leaves out those that lack an aligner",
    )
    aligner: tuple[str, ...] | None = option(
        None,
        help="aligners of kvalign, a row each: folder, hub id or shipped name (default: "
        "shipped; without one, the newest in kvalign-data/MODEL)",
    )
    cache_sizes: tuple[int, ...] = option(
        (64,), help="entries the cache keeps, sinks included, comma-separated", at_least=1
    )
    num_evicted: tuple[str, ...] | None = like(
        CacheSizes,
        "num_evicted",
        more=": a number, or half, quarter, eighth of the window (default: 1; discard-half: half)"
        f"{SEVERAL}",
    )
    realign_every: tuple[int, ...] = like(CacheSizes, "realign_every", (1,), more=SEVERAL)
    policy: tuple[str, ...] = like(CacheSizes, "policy", (OLDEST,), more=SEVERAL)
    num_recent: tuple[int, ...] | None = like(CacheSizes, "num_recent", more=SEVERAL, at_least=0)
    positions: tuple[str, ...] = like(CacheSizes, "positions", ("compact",), more=SEVERAL)
    cache_dtype: tuple[str, ...] = like(CacheSizes, "cache_dtype", ("model",), more=SEVERAL)
    memory: tuple[int, ...] = like(CacheSizes, "memory", (0,), more=SEVERAL)
    num_recalled: tuple[int, ...] | None = like(
        CacheSizes, "num_recalled", more=SEVERAL, at_least=1
    )
    recall_places: str | None = like(CacheSizes, "recall_places")
    recall_layers: str | None = like(CacheSizes, "recall_layers")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.methods:
            if name not in METHODS:
                raise UserError(unknown("method", name, METHODS))
        if not any(self.memory) and {*OF_MEMORY[1:]} & {*self.changed()}:
            raise UserError(
                f"{', '.join(map(flag, OF_MEMORY[1:]))} need a memory: give --memory, too"
            )
        for number in self.num_evicted or ():
            num_evicted_of(number, 2)
        reference = getattr(self, "reference", None)
        if reference and reference not in self.methods and "reference" in self.changed():
            raise UserError(f"--reference {reference} is not among --methods")


@dataclass(frozen=True, kw_only=True)
class DrawnSettings(ComparisonSettings):
    """Base of the settings of evaluations that have a figure of any results."""

    plot: Path | None = option(
        None, help="also draw the report's figure (.png or .svg)", writes="file"
    )


class Evaluation:
    """Evaluation: its settings, its measurement, and how results are shown.

    Attributes:
        settings: the class of its settings.
        run: from settings to the document.
        columns: those of its tables, by their name in a row.
        heading, about: of its section of the report.
        over: column of its figure's x axis; the report has no figure of a single value.
    """

    settings: ClassVar[type[ResultSettings]]
    run: ClassVar[Callable[..., Document]]
    columns: ClassVar[Mapping[str, Column]]
    heading: ClassVar[str]
    about: ClassVar[str]
    over: ClassVar[str] = ""

    def select(self, documents: Documents) -> Documents:
        """Documents whose figures are on the report's first screen."""
        return documents

    def rows(self, document: Document) -> list[Row]:
        """The rows of its tables: those of the document, or their means."""
        return document["rows"]

    def title(self, document: Document) -> str:
        """Return the title of its tables."""
        return str(document["settings"]["model"])

    def tables(
        self, document: Document, columns: Mapping[str, Column] | None = None
    ) -> list[Table]:
        """Table for each cache size, of all columns or of the given ones, so that the best is among
        methods that keep equally many entries; texts without a method have none.
        """
        reference, of = document["settings"].get("reference"), self.title(document)
        groups = grouped(self.rows(document), "cache_size")
        titles = [f"{of}, C = {size}" if size else of for size in groups]
        pairs = zip(titles, groups.values(), strict=True)
        return [table(title, rows, columns or self.columns, reference) for title, rows in pairs]

    def figure(self, document: Document) -> Drawing | None:
        """Figure of the results, with its caption, if there is one."""
        return None

    def _of_several(self, document: Document) -> Drawing | None:
        is_one = self.over and len({row[self.over] for row in document["rows"]}) == 1
        return None if is_one else self.figure(document)

    def sections(self, documents: Documents) -> list[Section]:
        """Sections of the report; those without a plot or a table are left out."""
        return [Section.of(documents, self.heading, self.about, self._of_several, self.tables)]

    def doubt(self, document: Document) -> str:
        """Return why its figures are not to be compared; "" if they are."""
        return ""

    def yardstick(self, document: Document) -> Row | None:
        """Row beside which others are read, such as that of a human's text."""
        return None

    def panels(self, document: Document) -> list[Panel]:
        """Passages to show side by side."""
        return []

    def show(self, document: Document, settings: Any) -> None:
        """Print the results of a run with these settings."""
        print_tables(tables := self.tables(document))
        print_meanings(tables)
