"""Commands that evaluate: one evaluation, and the report of a folder of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalign.app.cli.next_steps import say_written
from kvalign.foundation.settings import Settings, option

if TYPE_CHECKING:
    from kvalign.eval.protocol import Evaluation
    from kvalign.eval.protocol.data import Document

_WRITTEN = ("plot", "keep", "out", "csv", "page")  # settings that name a file or a folder


def evaluate(evaluation: Evaluation, settings: Any, as_json: bool) -> Document:
    document = evaluation.run(settings)
    if not as_json:
        evaluation.show(document, settings)
    say_written(*(getattr(settings, name, None) for name in _WRITTEN))
    return document


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
    tables: str | None = option(
        None, choices=("markdown", "latex"), help="print the tables in this form instead"
    )


def report(settings: ReportSettings, as_json: bool) -> dict[str, Any] | None:
    if settings.tables:
        from kvalign.eval.report.page import print_as

        print_as(settings.tables, settings.folder)
        return None
    if settings.terminal:
        from kvalign.eval.report.page import show

        show(settings.folder)
        return None
    from kvalign.eval import write_report

    page = write_report(settings.folder)
    if not as_json:
        print(f"report: {page}")
    return {"report": str(page)}
