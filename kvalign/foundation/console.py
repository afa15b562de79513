"""Tables in a terminal, a file or a pipe, with rich; text from outside has no effect."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvalign.foundation.errors import escape_controls

GAP = 3  # columns between two of a table
PIPE_WIDTH = 10_000  # columns of a file or a pipe: a row of a table is one line, however long


class Heading(NamedTuple):
    """Heading of a column; numbers are aligned to the right."""

    text: str
    is_number: bool = False


@dataclass(frozen=True)
class Entry:
    """Cell of a table; the best of a column has a mark. `more` matters less: an interval."""

    text: str
    is_best: bool = False
    more: str = ""

    @property
    def line(self) -> str:
        mark = " ★" if self.is_best else ""
        return f"{self.text}{mark} ({self.more})" if self.more else self.text + mark


def console_for(pipe_width: int = PIPE_WIDTH) -> Console:
    """Console as wide as COLUMNS says or the terminal is; a file or a pipe has no width."""
    console = Console(highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = max(console.width, pipe_width)
    return console


def print_table(
    headings: Sequence[Heading | str],
    rows: Sequence[Sequence[Entry | str]],
    *,
    title: str = "",
    console: Console | None = None,
) -> None:
    """Print one table, a line for each row if the console is wide enough.

    Args:
        headings: of the columns; a table with only empty headings begins with its first row.
        rows: as many entries each.
        title: a line above the table.
        console: where to print; by default stdout.
    """
    columns = [Heading(one) if isinstance(one, str) else one for one in headings]
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        show_header=any(column.text for column in columns),
        pad_edge=False,
    )
    for number, column in enumerate(columns):
        table.add_column(
            Text(escape_controls(column.text)),
            justify="right" if column.is_number else "left",
            no_wrap=number == 0,  # what a row is of is read at once
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(_text, row))
    console = console or console_for()
    if title:  # over the console's width, not the table's
        console.print(Text(escape_controls(title), "bold"))
    console.print(table)


def fits(titles: Sequence[str], rows: Sequence[Sequence[Entry]], width: int) -> bool:
    """Return whether a table of these columns, neither cut nor wrapped, fits this width."""
    columns = zip(titles, *([entry.line for entry in row] for row in rows), strict=True)
    return sum(map(_longest, columns)) + GAP * (len(titles) - 1) <= width


def _longest(texts: Iterable[str]) -> int:
    return max(cell_len(escape_controls(" ".join(text.split()))) for text in texts)


def print_cards(titles: Sequence[str], rows: Sequence[Sequence[Entry]], console: Console) -> None:
    """Print a card for each row, its first entry as the title, where a table would be too wide."""
    for name, *entries in rows:
        console.print(Text(escape_controls(name.line), "bold"))
        pairs = zip(titles[1:], entries, strict=True)
        facts = [f"{title} {' '.join(x.line.split())}" for title, x in pairs if x.line]
        lines = [""]
        for fact in facts:  # whole, where a line has room for it
            joined = f"{lines[-1]} · {fact}" if lines[-1] else fact
            if lines[-1] and cell_len(joined) > console.width - 2:
                lines.append(fact)
            else:
                lines[-1] = joined
        for line in lines:
            console.print(Padding(Text(escape_controls(line)), (0, 0, 0, 2), expand=False))


def _text(cell: Entry | str) -> Text:
    cell = Entry(cell) if isinstance(cell, str) else cell
    text = escape_controls(" ".join(cell.line.split()))
    return Text(text, "bold green" if cell.is_best else "")
