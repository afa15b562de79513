"""The report in a terminal: the summary, and every passage as a strip of its chunks."""

from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from kvalign.escape import escape_controls
from kvalign.eval.paper import paper_tables
from kvalign.eval.passages import Panel, panels
from kvalign.eval.report_sections import sections
from kvalign.eval.report_tables import Table, summary
from kvalign.eval.results_folder import read

WIDTH = 132  # columns
ARROWS = {"lower": " ↓", "higher": " ↑", "": ""}


def show(folder: Path, console: Console | None = None) -> None:
    """Print the summary, the tables and the strips of a folder of results.

    Raises:
        UserError: as `results_folder.read`.
    """
    results = read(folder)
    console = console or Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console.width = max(console.width, WIDTH)
    tables = [("Summary", summary(results))]
    tables += [(section.title, section.tables) for section in sections(results)]
    tables += [("Beside the paper", paper_tables(results))]
    for title, own in tables:
        if own:
            console.rule(Text(title))
        for table in own:
            console.print(_table(table))
    for document in results.of("readability").values():
        for panel in panels(document):
            _strips(panel, console)


def _table(table: Table) -> RichTable:
    found = RichTable(title=Text(escape_controls(table.title)), title_justify="left")
    for column in table.columns:
        found.add_column(
            Text(column.title + ARROWS[column.better]),
            justify="right" if column.is_number else "left",
            no_wrap=not column.is_number,
        )
    for row in table.rows:
        found.add_row(
            *(
                Text(
                    escape_controls(e.text) + (" ★" if e.is_best else ""),
                    "bold green" if e.is_best else "",
                )
                for e in row
            )
        )
    return found


def _strips(panel: Panel, console: Console) -> None:
    """Readable chunks are full blocks, unreadable ones low: not by colour alone."""
    console.rule(Text(escape_controls(panel.title)))
    width = max(len(passage.method) for passage in panel.passages)
    for passage in panel.passages:
        line = Text(f"{escape_controls(passage.method):{width}} {100 * passage.readable:4.0f} % ")
        for piece in passage.pieces:
            line.append(*(("█", "green") if piece.is_readable else ("▂", "red")))
        console.print(line)
    console.print(Text("█ readable chunk of 10 tokens, ▂ unreadable", "dim"))
