"""Tables in a terminal, a file or a pipe, by rich; text of models and users acts nowhere."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvalign.escape import escape_controls

PIPE_WIDTH = 132  # columns; a file or a pipe has no width of its own


@dataclass(frozen=True)
class Heading:
    """A column's; numbers are set to the right."""

    text: str
    is_number: bool = False


@dataclass(frozen=True)
class Cell:
    """One entry; the best of a column is marked, and not by colour alone."""

    text: str
    is_best: bool = False


def console_for(stderr: bool = False) -> Console:
    """A console as wide as the terminal, or as a table needs where there is none."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, PIPE_WIDTH)
    return console


def print_table(
    headings: Sequence[Heading | str],
    rows: Sequence[Sequence[Cell | str]],
    *,
    title: str = "",
    console: Console | None = None,
) -> None:
    """Print one table, a line a row where the console is wide enough."""
    table = Table(
        title=Text(escape_controls(title)) if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in headings:
        heading = Heading(heading) if isinstance(heading, str) else heading
        name = Text(escape_controls(heading.text))
        table.add_column(name, justify="right" if heading.is_number else "left")
    for row in rows:
        table.add_row(*map(_text, row))
    (console or console_for()).print(table)


def _text(cell: Cell | str) -> Text:
    cell = Cell(cell) if isinstance(cell, str) else cell
    text = escape_controls(" ".join(cell.text.split()))
    return Text(f"{text} ★" if cell.is_best else text, "bold green" if cell.is_best else "")
