"""Disks that are full, or may not be written: one line, nothing half-written, what was there stays.

Full is a limit on the length of files, which the system keeps to as to a disk's end.
"""

import errno
import json
import os
import resource
import shlex
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.refusals import files_in
from helpers.results_example import documents
from helpers.smaller import run_cell

from kvalign.app.cli.main import main

ROOM = 1000  # bytes of a file
PERPLEXITY = "eval perplexity --methods window --cache-sizes 16 --num-tokens 20"
COMMANDS = {
    "report": "report results",
    "kept losses": f"{PERPLEXITY} --keep o",
    "a plot": f"{PERPLEXITY} --plot o/plot.png",
    "a page": "eval readability --methods window --cache-sizes 16 --max-new-tokens 20 --page o",
    "a suite": "eval run suite.yaml --out o",
    "a recording": "gen-data --num-tokens 600 --chunk-len 64 --out o",
    "a memory": "chat --model llama-mini --state o/talk.safetensors --say Hi --max-new-tokens 9 "
    "--cache-size 16 --memory 50",
    "a talk": "chat --model gpt2-mini --state o/talk.safetensors --say Hi --max-new-tokens 3",
}


@contextmanager
def full():
    """Below here; Python would write compiled modules as far as they fit, for all later tests."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def read_only():
    """Below here: root may write to folders that say no."""

    def refused(call):
        def called(path, *more, **named):
            if os.path.abspath(path).startswith(os.getcwd()):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return call(path, *more, **named)

        return called

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "replace", "rename", "remove"):
            patch.setattr(os, name, refused(getattr(os, name)))
        yield


SLOW = ("a page", "a suite", "a recording")
NAMES = [pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in COMMANDS]


@pytest.mark.parametrize("disk", [full, read_only])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_one_line_and_leaves_nothing(name, disk, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "p.json").write_text(json.dumps(documents()["perplexity"]))
    (tmp_path / "suite.yaml").write_text(f"cells: [{{name: one, command: {PERPLEXITY}}}]\n")
    monkeypatch.setattr("kvalign.app.commands.eval_run.Cell.output", run_cell)
    before = files_in(Path())
    with disk():
        code = main(shlex.split(COMMANDS[name]))
    printed = capfd.readouterr()
    said, goes_on = printed.err.splitlines(), name in ("a talk", "a memory")
    assert bool(printed.out) == goes_on, "an answer that cannot be kept is shown"
    assert code == (2 if disk is read_only and not goes_on else 1), said
    assert len([line for line in said if "error: " in line]) == 1, said
    assert "an error in KV-Align" not in said[-1] and "Traceback" not in "".join(said)
    left = files_in(Path())
    assert before.items() <= left.items()
    assert set(left) - set(before) <= {"o", "results/plots"}  # folders, at most
