"""`kvalign report`: a page, plots and tables of the results in a folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvalign.foundation.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class ReportSettings(Settings):
    """Write report.html, one self-contained page of all results in a folder, and its plots as PNG
    and SVG. The folder is one of `kvalign eval run`, or holds what any `kvalign eval` printed with
    --json, a .json file each.

    Example:
        kvalign report results
    """

    folder: Path = option(help="folder with results", positional=True)
    terminal: bool = option(False, help="show the results here instead of writing the page")


def run(settings: ReportSettings, as_json: bool) -> dict[str, Any] | None:
    if settings.terminal:
        from kvalign.eval.report.terminal import show

        show(settings.folder)
        return None
    from kvalign.eval import write_report

    page = write_report(settings.folder)
    if not as_json:
        print(f"report: {page}")
    return {"report": str(page)}
