"""Cells of a suite without a process each, which takes seconds to import what it needs."""

import contextlib
import io
import shlex

from kvalign.cli import main


def run_here(command, out):
    """As `kvalign.eval.suite.run_cell`, in this process."""
    printed = io.StringIO()
    words = [word.replace("{out}", str(out)) for word in shlex.split(command)][1:]
    with contextlib.redirect_stdout(printed):
        assert main([*words, "--json"]) == 0, command
    return printed.getvalue()
