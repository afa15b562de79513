"""Results in a terminal: tables, and every passage as a strip of its chunks."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from kvalign.console import Heading, console_for, print_table
from kvalign.escape import escape_controls
from kvalign.eval.contents import panels, paper_tables, sections, summary
from kvalign.eval.evaluation import Panel
from kvalign.eval.results_folder import read
from kvalign.eval.tables import Table

ARROWS = {"lower": " ↓", "higher": " ↑", "": ""}


def show(folder: Path, console: Console | None = None) -> None:
    """Print the summary, the tables and the strips of a folder of results.

    Raises:
        UserError: as `results_folder.read`.
    """
    results = read(folder)
    console = console or console_for()
    parts = [("Summary", summary(results))]
    parts += [(section.title, section.tables) for section in sections(results)]
    parts += [("Beside the paper", paper_tables(results))]
    for title, tables in parts:
        if tables:
            console.rule(Text(title))
        print_tables(tables, console)
    for panel in panels(results):
        _print_strips(panel, console)


def print_tables(tables: list[Table], console: Console | None = None) -> None:
    for table in tables:
        headings = [Heading(c.title + ARROWS[c.better], c.is_number) for c in table.columns]
        print_table(headings, table.rows, title=table.title, console=console)


def print_passages(panels: list[Panel], console: Console | None = None) -> None:
    """Print what was written, if this is a terminal: readable chunks green, unreadable ones red and
    underlined. A console without colours underlines alone.
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
