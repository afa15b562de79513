"""One self-contained page of all results in a folder: no request leaves it, nothing on it runs but
its own script, and text of models and users is data.
"""

import base64
import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvalign.escape import escape_controls
from kvalign.eval.paper import paper_tables
from kvalign.eval.passages import panels
from kvalign.eval.plots import inline_svg, save
from kvalign.eval.report_sections import Plot, Section, sections
from kvalign.eval.report_tables import summary
from kvalign.eval.results_folder import Results, read
from kvalign.eval.rows import flat
from kvalign.files import write_text
from kvalign.methods import METHODS

PAGE = "report.html"


def write(folder: Path) -> Path:
    """Write report.html and plots/*.png, *.svg into a folder of results.

    Returns:
        The page's path.

    Raises:
        UserError: as `results_folder.read`.
    """
    results = read(folder)
    found = sections(results)
    page = render(results, found)
    (folder / "plots").mkdir(exist_ok=True)
    for section in found:
        for plot in section.plots:
            for ending in (".png", ".svg"):
                save(plot.figure, folder / "plots" / f"{plot.name}{ending}")
    write_text(folder / PAGE, page)
    return folder / PAGE


def render(results: Results, found: list[Section] | None = None) -> str:
    """The page's source."""
    templates = Environment(
        loader=PackageLoader("kvalign.eval"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"escape_controls": escape_controls, "svg": _svg}
    script = _template("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    used = {row["method"] for d in results.documents.values() for row in d["rows"]}
    return templates.get_template("report.html").render(
        title=results.suite.get("title", "Streaming methods side by side"),
        about=results.suite.get("about", ""),
        documents=results.documents,
        summary=summary(results),
        sections=sections(results) if found is None else found,
        panels=[panel for d in results.of("readability").values() for panel in panels(d)],
        paper=results.suite.get("paper", {}),
        paper_tables=paper_tables(results),
        methods={name: cls.about for name, cls in METHODS.items() if name in used},
        csv={name: _csv(document) for name, document in results.documents.items()},
        style=Markup(_template("report.css")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def _svg(plot: Plot) -> Markup:
    """A figure in the page; our own drawing, so it is not escaped."""
    return Markup(inline_svg(plot.figure, plot.name))


def _csv(document: dict[str, Any]) -> str:
    """The rows as a link that holds them."""
    rows = flat(document["rows"]).to_csv(index=False).encode()
    return "data:text/csv;base64," + base64.b64encode(rows).decode()


def _template(name: str) -> str:
    folder = resources.files("kvalign.eval").joinpath("templates")
    return folder.joinpath(name).read_text(encoding="utf-8")
