"""Commands that evaluate: one evaluation, a suite of them into a folder, the report of a folder."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalign.app.cli.next_steps import say_next, say_written
from kvalign.foundation.settings import MOST_PROCESSES, Settings, option

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
class RunSettings(Settings):
    """Run every cell of a suite whose result is not yet in the folder, then write the report.

    Suites: quick (a minute or two), full (every evaluation, short), reference (the shipped models),
    paper-distilgpt2 and paper-smollm2 (the paper's tables and figures), paper-gpt2-mini (the same
    experiments on a shipped model), learned-positions (a larger one), or a .yaml file of your own.

    Example:
        kvalign eval run quick --out results --override "--cache-sizes 32 --num-tokens 60"
    """

    suite: str = option(help="name of a suite, or a .yaml file", positional=True)
    out: Path = option(
        help="folder for results and report; finished cells in it are kept", writes="folder"
    )
    override: str = option(
        "",
        help='flags that replace those of the cells, such as "--device cuda"; with '
        "another --model, here or as a variable, a cell loses the suite's aligners",
    )
    variables: str = option(
        "", help='variables of the suite to change, such as "model=FOLDER corpus=text:mine.txt"'
    )
    ray: bool = option(False, help="run the cells side by side on Ray")
    ray_address: str | None = option(None, help="Ray cluster (default: start one here)")
    cpus_per_cell: int = option(
        1, help="Ray: CPUs for each cell", at_least=1, at_most=MOST_PROCESSES
    )
    gpus_per_cell: float = option(
        0, help="Ray: GPUs for each cell", at_least=0, at_most=MOST_PROCESSES
    )


def eval_run(settings: RunSettings, as_json: bool) -> dict[str, Any]:
    from kvalign.app.suite import run_suite
    from kvalign.eval import write_report

    states = run_suite(settings)
    has_results = any(settings.out.glob("*.json"))  # preparations have none
    page = str(write_report(settings.out)) if has_results else None
    if not as_json:
        before = f"{list(states.values()).count('kept')} of them from before"
        print(f"{len(states)} cells in {settings.out}, {before}", file=sys.stderr)
        if page:
            print(f"report: {page}")
            say_next("report", settings.out, "--terminal")
    return {"out": str(settings.out), "cells": states, "report": page}


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
