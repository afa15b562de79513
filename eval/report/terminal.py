"""Results in a terminal: tables, and every passage as a strip of its chunks."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from kvalign.eval.protocol import Panel, Table
from kvalign.eval.protocol.statistics import MEANING
from kvalign.eval.report import read
from kvalign.eval.report.contents import (
    FirstScreen,
    first_screens,
    panels,
    paper_tables,
    sections,
    summary,
)
from kvalign.foundation.console import (
    ROW_WIDTH,
    Entry,
    Heading,
    console_for,
    print_cards,
    print_table,
)
from kvalign.foundation.escape import escape_controls

ARROWS = {"lower": " ↓", "higher": " ↑", "": ""}
GAP = 3  # columns between two of a table


def show(folder: Path, console: Console | None = None) -> None:
    """Print the summary, the tables and the strips of a folder of results.

    Raises:
        UserError: as `kvalign.eval.report.read`.
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
    """Print tables. Where the console is too narrow for one, it has no intervals; where this is not
    enough, each row is a card.
    """
    console = console or console_for(pipe_width=ROW_WIDTH)
    for table in tables:
        titles = [column.title + ARROWS[column.better] for column in table.columns]
        bare = [[replace(entry, more="") for entry in row] for row in table.rows]
        rows = table.rows if fits(titles, table.rows, console.width) else bare
        notes = [table.note]
        if fits(titles, rows, console.width):
            headings = [Heading(t, c.is_number) for t, c in zip(titles, table.columns, strict=True)]
            print_table(headings, rows, title=table.title, console=console)
            if rows != table.rows:
                notes.insert(0, f"without intervals, which need more than {console.width} columns")
        else:
            console.print(Text(escape_controls(table.title), "bold"))
            print_cards(titles, table.rows, console)
        for note in filter(None, notes):
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


def fits(titles: list[str], rows: list[list[Entry]], width: int) -> bool:
    """Return whether a table of these columns, neither cut nor wrapped, fits this width."""
    columns = zip(titles, *([entry.line for entry in row] for row in rows), strict=True)
    return sum(map(_longest, columns)) + GAP * (len(titles) - 1) <= width


def _longest(texts: Iterable[str]) -> int:
    return max(cell_len(escape_controls(" ".join(text.split()))) for text in texts)


def _print_first(screens: list[FirstScreen], console: Console) -> None:
    """The subject of each model's figures, and its verdicts."""
    if screens:
        console.rule(Text("Verdicts"))
    for one in screens:
        console.print(Text(escape_controls(f"{one.model}: {one.about}"), "bold"))
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
