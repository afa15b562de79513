"""`kvalign eval run`: run a suite of evaluations into a folder, cell by cell."""

import json
import sys

from kvalign.app.cli.next_steps import say_next
from kvalign.app.suites.settings import RunSettings
from kvalign.foundation.errors import RunError


def run(settings: RunSettings, as_json: bool) -> None:
    from kvalign.app.suites.suite import NOT_RUN, run_suite
    from kvalign.eval import write_report

    states = run_suite(settings)
    has_results = any(settings.out.glob("*.json"))  # preparations have none
    page = str(write_report(settings.out)) if has_results else None
    if as_json:
        print(json.dumps({"out": str(settings.out), "cells": states, "report": page}))
    else:
        before = f"{list(states.values()).count('kept')} of them from before"
        print(f"{len(states)} cells in {settings.out}, {before}", file=sys.stderr)
    if page and not as_json:
        print(f"report: {page}")
        say_next("report", settings.out, "--terminal")
    if not_run := [name for name, state in states.items() if state == NOT_RUN]:
        raise RunError(
            f"{len(not_run)} of {len(states)} cells were not run, because what they need is "
            f"missing (first line): {', '.join(not_run)}"
        )
