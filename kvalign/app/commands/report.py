"""`kvalign report`: a page, plots and tables from a folder of results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvalign.foundation.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class ReportSettings(Settings):
    """Write report.html, one self-contained page of all results in a folder, and its plots as PNG
    and SVG. The folder comes from `kvalign eval run`, or contains the --json output of any `kvalign
    eval`, one .json file each.

    Example:
        kvalign report results
    """

    folder: Path = option(help="folder with results", positional=True)
    terminal: bool = option(
        False, help="show the results in the terminal instead of writing the page"
    )


def report(settings: ReportSettings, as_json: bool) -> dict[str, Any] | None:
    if settings.terminal:
        from kvalign.eval.report.page import show

        show(settings.folder)
        return None
    from kvalign.eval import write_report

    page = write_report(settings.folder)
    if not as_json:
        print(f"report: {page}")
    return {"report": str(page)}
