"""Self-contained page of all results in a folder. It loads nothing and runs only its own script;
text from models and users is data.
"""

import base64
import hashlib
from datetime import date
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvalign.eval.drawing import inline_legend, inline_svg, save
from kvalign.eval.protocol import Row, Section
from kvalign.eval.protocol.statistics import MEANING
from kvalign.eval.protocol.tables import csv_of
from kvalign.eval.report import Results, read
from kvalign.eval.report.contents import (
    MEANS,
    first_screens,
    panels,
    paper_tables,
    sections,
    summary,
)
from kvalign.foundation.escape import escape_controls
from kvalign.foundation.files import write_text
from kvalign.methods.registry import METHODS

PAGE = "report.html"


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
    templates.filters["svg"] = lambda plot: Markup(inline_svg(plot.figure, plot.name))
    templates.filters["legend"] = lambda plot: Markup(inline_legend(plot.figure, plot.name))
    style, script = (loader.get_source(templates, f"report.{x}")[0] for x in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    names = {row["method"] for d in documents for row in d["rows"]}
    return templates.get_template("report.html").render(
        suite=results.suite,
        of=_of(results),
        documents=results.documents,
        changed=[x for x in dict.fromkeys(d.get("changed") for d in documents) if x],
        screens=first_screens(results),
        meaning=f"{MEANING} {MEANS}",
        summary=summary(results),
        sections=contents,
        panels=panels(results),
        paper_tables=paper_tables(results),
        methods={name: METHODS.find(name).about for name in METHODS if name in names},
        csv={name: _link(document["rows"]) for name, document in results.documents.items()},
        style=Markup(style),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def _of(results: Results) -> str:
    """The subject of the page, beside its title: models, KV-Align's versions that measured, the day
    on which it is written.
    """
    documents = results.documents.values()
    models = dict.fromkeys(d["settings"].get("model") or "" for d in documents)
    versions = dict.fromkeys(str(d["environment"].get("kvalign", "")) for d in documents)
    by = " and ".join(filter(None, versions))
    measured = f"measured by KV-Align {by}" if by else ""
    facts = (", ".join(filter(None, models)), measured, f"written {date.today().isoformat()}")
    return "; ".join(filter(None, facts))


def _link(rows: list[Row]) -> str:
    """A link that holds the rows as CSV."""
    return "data:text/csv;base64," + base64.b64encode(csv_of(rows).encode()).decode()
