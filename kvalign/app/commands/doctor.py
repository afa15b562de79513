"""`kvalign doctor`: what is installed, reachable and available on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from kvalign.foundation.settings import Settings

if TYPE_CHECKING:
    from kvalign.app.inventory.checks import Check


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(Settings):
    """Show what is installed, reachable and available on this machine, and how to get the rest.

    Each thing is ok, missing (KV-Align works without it) or wrong (present but unusable). Nothing
    is fetched. Exit code 1: something required is missing or wrong.

    Example:
        kvalign doctor
    """


def run(settings: DoctorSettings, as_json: bool) -> None:
    from kvalign.app.inventory.checks import examine, is_fit

    checks = examine()
    if as_json:
        print(json.dumps({"fit": is_fit(checks), "checks": list(map(asdict, checks))}))
    else:
        show(checks)
    if not is_fit(checks):
        raise SystemExit(1)


def show(results: list[Check]) -> None:
    """Print a table for each group, and a summary line. States are words, not only colours."""
    from kvalign.foundation.console import Heading, print_table

    headings: list[Heading | str] = [
        Heading(min_width=len("missing")),
        Heading(min_width=max(len(check.name) for check in results)),
        "",
    ]
    for group, members in groupby(results, lambda check: check.group):
        rows = [[check.state, check.name, check.message] for check in members]
        print_table(headings, rows, title=group)
        print()
    not_ok = [check for check in results if check.state != "ok"]
    required = [check.name for check in not_ok if check.required]
    fit = "everything required is here"
    if required:
        fit = f"required, but not ok: {', '.join(required)}"
    print(f"{fit}; optional, but not ok: {len(not_ok) - len(required)}")
