"""Results in a terminal: tables, and every passage as a strip of its chunks."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from kvalign.eval.protocol.evaluation import Panel, Table
from kvalign.eval.protocol.verdicts import MEANING
from kvalign.eval.report.contents import panels, paper_tables, sections, summary
from kvalign.eval.report.first_screen import FirstScreen, first_screens
from kvalign.eval.report.results_folder import read
from kvalign.foundation.console import ROW_WIDTH, Entry, Heading, console_for, print_table
from kvalign.foundation.escape import escape_controls

ARROWS = {"lower": " ↓", "higher": " ↑", "": ""}
LABEL = 30  # columns that are left to what a row is called, at least
GAP = 3  # columns between two of a table
LESS = 3  # weight that an interval has less than its figure


def show(folder: Path, console: Console | None = None) -> None:
    """Print the summary, the tables and the strips of a folder of results.

    Raises:
        UserError: as `results_folder.read`.
    """
    results = read(folder)
    console = console or console_for()
    _print_first(first_screens(results), console)
    of_sections = [(section.title, section.tables) for section in sections(results)]
    beside = ("Beside the paper", paper_tables(results))
    for title, tables in [("Summary", summary(results)), *of_sections, beside]:
        if tables:
            console.rule(Text(title))
        print_tables(tables, console)
    for panel in panels(results):
        _print_strips(panel, console)


def print_tables(tables: list[Table], console: Console | None = None) -> None:
    """Print tables, without the columns that do not fit, and name these."""
    console = console or console_for(pipe_width=ROW_WIDTH)
    for table in tables:
        part, omissions = fitted(table, console.width)
        widths = _widths(part, console.width)
        headings = [
            Heading(column.title + ARROWS[column.better], column.is_number, width=width)
            for column, width in zip(part.columns, widths, strict=True)
        ]
        print_table(headings, part.rows, title=part.title, console=console)
        omission = (
            f"left out at {console.width} columns: {'; '.join(omissions)}" if omissions else ""
        )
        for note in filter(None, (omission, table.note)):
            console.print(Text(note, "dim"))


def print_meanings(tables: list[Table]) -> None:
    """Print the meaning of the tables' columns and of the mark of the best."""
    means = {column.title: column.about for table in tables for column in table.columns}
    if any(entry.is_best for table in tables for row in table.rows for entry in row):
        means["★"] = "the best of its column with equal sinks: its interval overlaps no other"
    console = console_for(pipe_width=ROW_WIDTH)
    for title, about in means.items():
        if about:
            console.print(Text(f"{title}: {about}", "dim"))


def fitted(table: Table, width: int) -> tuple[Table, list[str]]:
    """Table that fits the console, and the parts left out: columns and intervals, those of the
    least weight first, among equals the last. Columns that distinguish rows and one column of
    figures stay.
    """
    columns = set(range(1, len(table.columns)))
    intervals = {i for i in columns if any(row[i].more for row in table.rows)}
    differing = {i for i in columns if len({row[i] for row in table.rows}) > 1}
    keys = {i for i in differing if table.columns[i].is_key}
    droppable = [(table.columns[i].weight, -i, "") for i in columns - keys]
    droppable += [(table.columns[i].weight - LESS, -i, "intervals of ") for i in intervals]
    omissions = list[str]()
    for _, column, what in sorted(droppable):
        part = _part(table, columns, intervals)
        if sum(_widths(part, width)) + GAP * len(columns) <= width or len(columns - keys) == 1:
            break
        (intervals if what else columns).discard(-column)
        title = table.columns[-column].title
        omissions = [name for name in omissions if name != f"intervals of {title}"]
        omissions.append(what + title)
    return _part(table, columns, intervals), omissions


def fits(titles: list[str], rows: list[list[Entry]], width: int) -> bool:
    """Return whether a table of these columns, neither cut nor wrapped, fits this width."""
    columns = zip(titles, *([entry.line for entry in row] for row in rows), strict=True)
    return sum(map(_longest, columns)) + GAP * (len(titles) - 1) <= width


def _part(table: Table, columns: set[int], intervals: set[int]) -> Table:
    indices = [0, *sorted(columns)]
    rows = [
        [row[i] if i in intervals else replace(row[i], more="") for i in indices]
        for row in table.rows
    ]
    return replace(table, columns=[table.columns[i] for i in indices], rows=rows)


def _widths(table: Table, width: int) -> list[int]:
    """Figures are never cut; headings wrap where there is no room for them, and what a row is
    called does if it takes more than its share.
    """
    names, *figures = zip(*([entry.line for entry in row] for row in table.rows), strict=True)
    label = min(_longest([table.columns[0].title, *names]), max(min(LABEL, width // 2), width // 3))
    titles = [column.title + ARROWS[column.better] for column in table.columns[1:]]
    for headings in ([[title] for title in titles], [title.split() for title in titles]):
        pairs = zip(headings, figures, strict=True)
        widths = [label, *(_longest([*heading, *column]) for heading, column in pairs)]
        if sum(widths) + GAP * len(titles) <= width:
            break
    return widths


def _longest(texts: Iterable[str]) -> int:
    return max(cell_len(escape_controls(" ".join(text.split()))) for text in texts)


def _print_first(screens: list[FirstScreen], console: Console) -> None:
    """The sentences and the verdicts of each model."""
    if screens:
        console.rule(Text("Findings"))
    for one in screens:
        console.print(Text(escape_controls(one.model), "bold"), soft_wrap=False)
        for sentence in one.sentences:
            console.print(Text("- " + escape_controls(sentence)))
    print_tables([one.verdicts for one in screens if one.verdicts], console)
    if any(one.verdicts for one in screens):
        console.print(Text(MEANING, "dim"))


def print_passages(panels: list[Panel], console: Console | None = None) -> None:
    """Print the passages, if this is a terminal: readable chunks green, others red and underlined.
    A console without colours only underlines.
    """
    console = console or console_for()
    if not console.is_terminal:
        return
    for panel in panels:
        console.rule(Text(escape_controls(panel.title)))
        for passage in panel.passages:
            share = f", {100 * passage.readable:.0f} % readable"
            console.print(Text(escape_controls(passage.label) + share, "bold"))
            line = Text().append(escape_controls(panel.prompt + passage.head), "dim")
            for piece in passage.pieces:
                style = "green" if piece.is_readable else "red underline"
                line.append(escape_controls(piece.text), style)
            console.print(line.append(escape_controls(passage.tail), "dim"), end="\n\n")


def _print_strips(panel: Panel, console: Console) -> None:
    """Readable chunks are full blocks, unreadable ones low: not by colour alone."""
    console.rule(Text(escape_controls(panel.title)))
    width = max(len(passage.method) for passage in panel.passages)
    for passage in panel.passages:
        line = Text(f"{escape_controls(passage.method):{width}} {100 * passage.readable:4.0f} % ")
        for piece in passage.pieces:
            line.append(*(("█", "green") if piece.is_readable else ("▂", "red")))
        console.print(line)
    console.print(Text("█ readable chunk of 10 tokens, ▂ unreadable", "dim"))
