"""Errors that end a command: one line each, an exit code that says whose fault it was, and the
traceback with --debug.
"""

import errno

import pytest
import torch

from kvalign.app.cli.main import main
from kvalign.app.listing import LISTED
from kvalign.foundation.errors import Interrupted, NotFoundError, RunError, UserError

OURS = "an error in KV-Align"
FULL = OSError(errno.ENOSPC, "No space left on device", "data/x.safetensors")
ERRORS = [
    (UserError("raise\n  --num-lines"), 2, "raise --num-lines"),
    (NotFoundError("no recorded data in d"), 2, "no recorded data in d"),
    (FileNotFoundError(errno.ENOENT, "None", "a.txt"), 2, "[Errno 2] None: 'a.txt'"),
    (ModuleNotFoundError("no nltk", name="nltk.corpus"), 2, "it needs nltk: pip install"),
    (RunError("every trial failed"), 1, "every trial failed"),
    (FULL, 1, "No space left on device: 'data/x.safetensors'; what was finished is kept"),
    (MemoryError(), 1, "not enough memory"),
    (torch.OutOfMemoryError("CUDA out of memory.\nTried"), 1, "memory: CUDA out of memory. Tried"),
    (ValueError("planted"), 1, f"{OURS} (ValueError: planted)"),
    (ModuleNotFoundError("none", name="kvalign.gone"), 1, f"{OURS} (ModuleNotFoundError: none)"),
]


@pytest.fixture
def fail(monkeypatch):
    """Let `kvalign list methods` raise an error."""

    def plant(error):
        def methods():
            raise error

        monkeypatch.setitem(LISTED, "methods", methods)

    return plant


@pytest.mark.parametrize(
    ("error", "code", "message"), ERRORS, ids=[repr(error)[:40] for error, _, _ in ERRORS]
)
def test_an_error_is_one_line_and_the_exit_code_says_whose_it_is(error, code, message, fail, capfd):
    fail(error)
    assert main(["list", "methods"]) == code
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("kvalign list: error: ") and message in captured.err
    ours = "please open an issue with the output of --debug\n"
    assert captured.err.endswith(ours) == (OURS in message)


@pytest.mark.parametrize("argv", [["--debug", "list", "methods"], ["list", "methods", "--debug"]])
@pytest.mark.parametrize("error", [ValueError("planted"), UserError("planted")])
def test_debug_shows_the_traceback(argv, error, fail, capfd):
    fail(error)
    assert main(argv) == (2 if isinstance(error, UserError) else 1)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and "planted" in lines[-1]
    assert sum(line.startswith("kvalign list: error: ") for line in lines) == 1


def test_ctrl_c_and_a_reader_that_leaves_are_no_errors(fail, monkeypatch, tmp_path, capfd):
    fail(KeyboardInterrupt())
    assert main(["list", "methods"]) == 130
    assert capfd.readouterr().err == "kvalign list: interrupted\n"
    fail(Interrupted("2 shards are kept"))
    assert main(["list", "methods", "--json"]) == 130
    kept = "interrupted; 2 shards are kept; to go on: kvalign list methods --json"
    assert capfd.readouterr().err == f"kvalign list: {kept}\n"
    monkeypatch.setattr("sys.stderr", (tmp_path / "stderr").open("w"))
    fail(BrokenPipeError())
    assert main(["list", "methods"]) == 0
