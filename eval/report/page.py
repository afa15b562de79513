"""A folder of results on one page, in a browser or in a terminal. The page in a browser loads
nothing and runs only its own script; text from models and users is data.
"""

import base64
import hashlib
import re
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.console import Console
from rich.text import Text

from kvalign.eval.drawing import inline_legend, inline_svg, save
from kvalign.eval.protocol.data import Panel, Section
from kvalign.eval.protocol.tables import ARROWS, csv_of, print_tables
from kvalign.eval.report import Results, read
from kvalign.eval.report.contents import MEANS, first_screens, panels, sections
from kvalign.foundation.console import console_for
from kvalign.foundation.errors import escape_controls
from kvalign.foundation.files import write_text
from kvalign.methods.registry import METHODS

PAGE = "report.html"
_PIPE_WIDTH = 168  # columns of a report in a file or a pipe
_UNSAFE = re.compile("[&%$#_{}]")  # in LaTeX


def write_report(folder: str | Path) -> Path:
    """Write report.html and plots/*.png, *.svg into a folder of results.

    Args:
        folder: of `kvalign eval run`, or with a .json file for each document of an evaluation.

    Returns:
        The page's path.

    Raises:
        NotFoundError: no folder, or none with results.
        UserError: a file in it that is not a document, or a damaged suite.
    """
    folder = Path(folder)
    results = read(folder)
    contents = sections(results)
    page = render(results, contents)
    (folder / "plots").mkdir(exist_ok=True)
    for section in contents:
        for plot in section.plots:
            for ending in (".png", ".svg"):
                save(plot.figure, folder / "plots" / f"{plot.name}{ending}")
    write_text(folder / PAGE, page)
    return folder / PAGE


def render(results: Results, contents: list[Section]) -> str:
    """Source of the page with these sections of the results."""
    documents = results.documents.values()
    loader = PackageLoader("kvalign.eval.report")
    blocks: dict[str, Any] = dict(trim_blocks=True, lstrip_blocks=True)
    templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, **blocks)
    templates.filters["escape_controls"] = escape_controls
    templates.filters["base64"] = lambda text: base64.b64encode(text.encode()).decode()
    templates.filters["csv"] = csv_of
    templates.filters["svg"] = lambda plot: Markup(inline_svg(plot.figure, plot.name))
    templates.filters["legend"] = lambda plot: Markup(inline_legend(plot.figure, plot.name))
    style, script = (loader.get_source(templates, f"report.{x}")[0] for x in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    names = {row["method"] for d in documents for row in d["rows"]}
    return templates.get_template("report.html").render(
        suite=results.suite,
        today=date.today().isoformat(),
        documents=results.documents,
        screens=first_screens(results),
        meaning=MEANS,
        sections=contents,
        panels=panels(results),
        methods={name: METHODS.find(name).about for name in METHODS if name in names},
        style=Markup(style),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def show(folder: Path, console: Console | None = None) -> None:
    """Print the verdicts, the tables and the strips of a folder of results.

    Raises:
        UserError: as `kvalign.eval.report.read`.
    """
    results = read(folder)
    console = console or console_for(pipe_width=_PIPE_WIDTH)
    if screens := first_screens(results):
        console.rule(Text("Verdicts"))
    for one in screens:
        console.print(Text(escape_controls(f"{one.model}: {one.take or one.about}"), "bold"))
        if one.take:
            console.print(Text(escape_controls(one.about)))
    print_tables([one.verdicts for one in screens if one.verdicts], console)
    for section in sections(results):
        if section.tables:
            console.rule(Text(section.title))
        print_tables(section.tables, console)
    print_passages(panels(results), console, as_strips=True)


def print_as(form: str, folder: Path) -> None:
    """Print all tables of a folder in Markdown or LaTeX, for a page or a paper."""
    from pandas import DataFrame

    results = read(folder)
    verdicts = [one.verdicts for one in first_screens(results) if one.verdicts]
    titled = [
        replace(t, title=f"{s.title}: {t.title}") for s in sections(results) for t in s.tables
    ]
    for table in [*verdicts, *titled]:
        titles = [column.title + ARROWS[column.better] for column in table.columns]
        lines = [[escape_controls(entry.line) for entry in row] for row in table.rows]
        if form == "latex":
            caption = _UNSAFE.sub(r"\\\g<0>", table.title)
            frame = DataFrame(lines, columns=titles)
            print(frame.to_latex(index=False, escape=True, caption=caption))
            continue
        print(f"**{table.title}**\n")
        cells = ([text.replace("|", r"\|") for text in row] for row in [titles, *lines])
        head, *others = (f"| {' | '.join(row)} |" for row in cells)
        print(head, f"|{' --- |' * len(titles)}", *others, "", sep="\n")


def print_passages(panels: list[Panel], console: Console, *, as_strips: bool = False) -> None:
    """Print passages: readable chunks green, others red and underlined; or as strips of full and
    low blocks. Neither is by colour alone.
    """
    for panel in panels:
        console.rule(Text(escape_controls(panel.title)))
        for passage in panel.passages:
            share = f", {100 * passage.readable:.0f} % readable"
            console.print(Text(escape_controls(passage.label) + share, "bold"))
            around = ("", "") if as_strips else (panel.prompt + passage.head, passage.tail)
            line = Text().append(escape_controls(around[0]), "dim")
            for piece in passage.pieces:
                style, block = ("green", "█") if piece.is_readable else ("red", "▂")
                style += " underline" * (not piece.is_readable and not as_strips)
                line.append(block if as_strips else escape_controls(piece.text), style)
            console.print(line.append(escape_controls(around[1]), "dim"))
